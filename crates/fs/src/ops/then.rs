//! Objects by their paths in a tree that nothing changes: a snapshot of the volume, or a moment.
//!
//! No inode in memory is needed: the record of each directory on the way is read.

use bytes::Bytes;
use ramet_betree::Snapshot;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::name::check_name;
use crate::format::record::{Entry, FLAG_CLONE_ROOT, FLAG_JOINING, Kind, Record};

/// An object, as it was.
#[derive(Clone, Debug)]
pub(crate) struct Then {
    pub(crate) record: Record,
    /// Path of its contents; of an inode with several names, that of the shared inode.
    pub(crate) path: Bytes,
    /// The clone root that it is, or is in.
    pub(crate) roots: Roots,
}

/// The paths of the clone roots that have the shared inodes of a directory: of the one that it is,
/// or is in, and of those around it that have some already, while clone roots are being joined
/// (`join.rs`).
#[derive(Clone, Debug)]
pub(crate) struct Roots {
    /// The outermost one first. All but that are being joined.
    paths: Vec<Bytes>,
}

impl Roots {
    /// The clone root at `path`, which is not being joined.
    pub(crate) fn of(path: Bytes) -> Self {
        Self { paths: vec![path] }
    }

    /// Goes down to a directory of the last one, which has this record.
    pub(crate) fn enter(&mut self, path: Bytes, record: &Record) {
        if record.has(FLAG_CLONE_ROOT) {
            if !record.has(FLAG_JOINING) {
                self.paths.clear();
            }
            self.paths.push(path);
        }
    }

    /// Adds the path of the clone root around the outermost one, which is being joined to it.
    pub(crate) fn add_outer(&mut self, path: Bytes) {
        self.paths.insert(0, path);
    }

    pub(crate) fn innermost(&self) -> &Bytes {
        self.paths.last().expect("one is always there")
    }

    pub(crate) fn all(&self) -> &[Bytes] {
        &self.paths
    }

    /// The clone root that has a shared inode with names in the directory.
    pub(crate) fn of_link(&self, tree: &Snapshot, link: u64) -> Result<&Bytes> {
        let (outermost, joining) = self.paths.split_first().expect("one is always there");
        for root in joining.iter().rev() {
            let record = keys::shared_record(&keys::shared_inode(root, link));
            if tree.get(&record)?.is_some() {
                return Ok(root);
            }
        }
        Ok(outermost)
    }
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
            roots: Roots::of(Bytes::new()),
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
                    at.roots.enter(at.path.clone(), &record);
                    at.record = record;
                }
                Entry::Link(link) => {
                    let root = at.roots.of_link(tree, link.link)?;
                    at.path = keys::shared_inode(root, link.link);
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
