//! Objects by their paths in a tree that nothing changes: a snapshot of the volume, or a moment.
//!
//! No inode in memory is needed: the record of each directory on the way is read.

use bytes::Bytes;
use ramet_betree::Snapshot;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::name::check_name;
use crate::format::record::{Entry, FLAG_CLONE_ROOT, Kind, Record};

/// An object, as it was.
#[derive(Clone, Debug)]
pub(crate) struct Then {
    pub(crate) record: Record,
    /// Path of its contents; of an inode with several names, that of the shared inode.
    pub(crate) path: Bytes,
    /// Path of the clone root that it is, or is in.
    pub(crate) root: Bytes,
}

/// The names of a path that are joined by `/`; empty for the root.
///
/// # Errors
/// `Invalid` and `NameTooLong` for a name that no entry can have.
pub(crate) fn names_of(path: &[u8]) -> Result<Vec<&[u8]>> {
    let names: Vec<&[u8]> = path
        .split(|&byte| byte == b'/')
        .filter(|name| !name.is_empty())
        .collect();
    names.iter().try_for_each(|name| check_name(name))?;
    Ok(names)
}

impl Then {
    /// The object that these names lead to from the root, if there is one. Symbolic links are not
    /// followed.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub(crate) fn find(tree: &Snapshot, names: &[&[u8]]) -> Result<Option<Self>> {
        let root = tree.get(&keys::root_record())?;
        let mut at = Self {
            record: inode(root, "record of the root")?,
            path: Bytes::new(),
            root: Bytes::new(),
        };
        for name in names {
            if at.record.kind() != Kind::Directory {
                return Ok(None);
            }
            let Some(value) = tree.get(&keys::entry(&at.path, name))? else {
                return Ok(None);
            };
            match Entry::decode(&value)? {
                Entry::Deleted(_) => return Ok(None),
                Entry::Inode(record) => {
                    at.path = keys::child(&at.path, name);
                    if record.has(FLAG_CLONE_ROOT) {
                        at.root = at.path.clone();
                    }
                    at.record = record;
                }
                Entry::Link(link) => {
                    at.path = keys::shared_inode(&at.root, link.link);
                    at.record = inode(tree.get(&keys::shared_record(&at.path))?, "hard link")?;
                }
            }
        }
        Ok(Some(at))
    }
}

fn inode(value: Option<Bytes>, what: &'static str) -> Result<Record> {
    match value.map(|value| Entry::decode(&value)).transpose()? {
        Some(Entry::Inode(record)) => Ok(record),
        _ => Err(Error::Corrupt {
            what,
            detail: "no record".to_owned(),
        }),
    }
}
