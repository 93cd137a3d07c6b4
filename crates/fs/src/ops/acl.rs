//! Access control lists of objects, and of the entries that a directory will have.
//!
//! A list is an extended attribute (`format/acl.rs`), and a flag of the record says that there is
//! one. So an object without a list costs nothing: no key is read when it is created below, changed
//! or asked for its list. The kernel decides about accesses, by the lists that it asks for. The
//! daemon keeps list and mode together: the nine permission bits of the mode are those of the list.
//!
//! - A new list sets the mode. A list that says no more than the mode is dropped.
//! - A new mode sets owner, mask (or owning group) and others in the list.
//! - A new object in a directory with a default list gets that list, limited by the mode that its
//!   maker asked for. The umask counts only where there is no default list. A new directory also
//!   inherits the default list, and a symbolic link inherits nothing.
//!
//! A clone and a file that is renamed keep their lists: the directory's list does not count.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::acl::{ACCESS, Acl, DEFAULT};
use crate::format::keys;
use crate::format::record::{FLAG_ACL, FLAG_DEFAULT_ACL, FLAG_XATTRS, Kind, Record};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::Transaction;

pub(crate) const PERMISSION_BITS: u32 = 0o777;

/// The flag of a record that says that this attribute exists; `None` for an attribute that is no
/// list.
pub(crate) fn flag_of(attribute: &[u8]) -> Option<u16> {
    match attribute {
        ACCESS => Some(FLAG_ACL),
        DEFAULT => Some(FLAG_DEFAULT_ACL),
        _ => None,
    }
}

/// The list of an object in this attribute, if there is one. The caller holds the object's state,
/// and not the topology.
pub(crate) fn list_of(
    namespace: &Namespace,
    (inode, record): (&Arc<Inode>, &Record),
    attribute: &[u8],
) -> Result<Option<Acl>> {
    if !flag_of(attribute).is_some_and(|flag| record.has(flag)) {
        return Ok(None);
    }
    let lookup = {
        let topology = namespace.topology.read();
        let path = topology.path(inode)?;
        namespace
            .tree
            .lookup_deferred(keys::xattr(&path, attribute))
    };
    let corrupt = |detail| Error::Corrupt {
        what: "access control list",
        detail,
    };
    let bytes = lookup.get()?;
    let bytes = bytes.ok_or_else(|| corrupt("missing".to_owned()))?;
    let list = Acl::decode(&bytes).map_err(|_| corrupt(format!("{bytes:?}")))?;
    Ok(Some(list))
}

/// The lists that a new object starts with.
#[derive(Default)]
pub(crate) struct Inherited {
    access: Option<Acl>,
    default: Option<Acl>,
}

impl Inherited {
    /// Makes the record of an object that is new in a directory fit the directory's default list,
    /// or applies the umask if there is none. Gives the lists that the object gets.
    pub(crate) fn of_directory(default: Option<Acl>, record: &mut Record, umask: u32) -> Self {
        let kind = record.kind();
        if kind == Kind::Symlink {
            return Self::default();
        }
        let Some(default) = default else {
            record.mode &= !(umask & PERMISSION_BITS);
            return Self::default();
        };
        let access = default.of_new(record.mode);
        record.mode = record.mode & !PERMISSION_BITS | access.mode_bits();
        let inherited = Self {
            access: (!access.is_mode()).then_some(access),
            default: (kind == Kind::Directory).then_some(default),
        };
        for (attribute, _) in inherited.lists() {
            record.flags |= FLAG_XATTRS | flag_of(attribute).expect("it is a list");
        }
        inherited
    }

    fn lists(&self) -> impl Iterator<Item = (&'static [u8], &Acl)> {
        let access = self.access.as_ref().map(|list| (ACCESS, list));
        let default = self.default.as_ref().map(|list| (DEFAULT, list));
        access.into_iter().chain(default)
    }

    /// Puts the lists of the object at the path that `path` makes. Most objects have none.
    pub(crate) fn put(&self, tx: &mut Transaction<'_>, path: impl FnOnce() -> Bytes) {
        if self.access.is_none() && self.default.is_none() {
            return;
        }
        let path = path();
        for (attribute, list) in self.lists() {
            tx.batch.put(keys::xattr(&path, attribute), list.encode());
        }
    }
}
