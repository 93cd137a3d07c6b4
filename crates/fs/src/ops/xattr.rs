//! Extended attributes.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::acl::Acl;
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::NAME_BYTES_MAX;
use crate::format::record::{
    CAPABILITY, FLAG_ACL, FLAG_CAPABILITY, FLAG_DEFAULT_ACL, FLAG_XATTRS, Kind, S_ISGID,
};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::resolve::past_rollbacks;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::acl::{PERMISSION_BITS, flag_of};
use crate::ops::attr::Attributes;

/// Longest value, in bytes.
pub const XATTR_BYTES_MAX: usize = 65536;

/// Whether an attribute may, must or must not exist before it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetXattr {
    /// Either way.
    Any,
    /// It must not.
    Create,
    /// It must.
    Replace,
}

/// Refuses a name that no attribute can have.
///
/// # Errors
/// `Range`, `Invalid`, and `Unsupported` for another namespace.
pub(crate) fn check(name: &[u8]) -> Result<()> {
    if flag_of(name).is_some() {
        return Ok(());
    }
    const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::Range);
    }
    match NAMESPACES
        .iter()
        .find(|namespace| name.starts_with(namespace))
    {
        Some(namespace) if name.len() > namespace.len() && !name.contains(&0) => Ok(()),
        Some(_) => Err(Error::Invalid("name of an attribute")),
        None => Err(Error::Unsupported),
    }
}

/// The flags of a record with an extended attribute of this name.
pub(crate) fn flags_of(name: &[u8]) -> u16 {
    let capability = match name == CAPABILITY {
        true => FLAG_CAPABILITY,
        false => 0,
    };
    FLAG_XATTRS | capability | flag_of(name).unwrap_or_default()
}

impl Attributes {
    /// Sets an attribute. The caller checked permissions. An access control list is set as
    /// [`Attributes::set_list`] does; `mode` does not count.
    ///
    /// # Errors
    /// `Exists`, `NoAttribute`, `AttributeTooBig`, `Unsupported` outside of `user.`, `trusted.` and
    /// `security.` and the two access control lists, and those of the tree.
    pub fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], mode: SetXattr) -> Result<()> {
        check(name)?;
        if value.len() > XATTR_BYTES_MAX {
            return Err(Error::AttributeTooBig);
        }
        if flag_of(name).is_some() {
            return self.set_list(ino, name, value, false);
        }
        past_rollbacks(&self.namespace, || {
            self.setxattr_once(ino, name, value, mode)
        })
    }

    fn setxattr_once(&self, ino: Ino, name: &[u8], value: &[u8], mode: SetXattr) -> Result<()> {
        let inode = self.namespace.inode(ino)?;
        self.namespace.tree.admit(value.len() + RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let protection = self.namespace.protections.of(&inode, tx.get(&inode))?;
        protection.allow_change()?;
        let exists = mode != SetXattr::Any
            && tx.get(&inode).has(FLAG_XATTRS)
            && self.has_xattr(&inode, name)?;
        match mode {
            SetXattr::Create if exists => return Err(Error::Exists),
            SetXattr::Replace if !exists => return Err(Error::NoAttribute),
            SetXattr::Any | SetXattr::Create | SetXattr::Replace => {}
        }
        let topology = self.namespace.topology.read();
        let path = topology.path(&inode)?;
        tx.batch.put(keys::xattr(&path, name), value.to_vec());
        let now = self.times.now();
        let record = tx.edit(&inode);
        record.flags |= flags_of(name);
        record.ctime = now;
        tx.apply(&topology, &self.namespace.tree)?
            .make_durable_telling(&self.namespace.caches, || {
                [Invalidation::Attributes(inode.ino)]
            })
    }

    /// Path and snapshot of an inode whose state is locked.
    fn xattr_view(&self, inode: &Arc<Inode>) -> Result<(Bytes, Snapshot)> {
        let topology = self.namespace.topology.read();
        Ok((topology.path(inode)?, self.namespace.tree.snapshot()))
    }

    fn has_xattr(&self, inode: &Arc<Inode>, name: &[u8]) -> Result<bool> {
        let (path, snapshot) = self.xattr_view(inode)?;
        Ok(snapshot.get(&keys::xattr(&path, name))?.is_some())
    }

    /// Value of an attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported`, and those of the tree.
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        check(name)?;
        let (path, snapshot) = past_rollbacks(&self.namespace, || {
            let inode = self.namespace.inode(ino)?;
            let record = inode.state.read();
            if !record.has(FLAG_XATTRS) {
                return Err(Error::NoAttribute);
            }
            self.xattr_view(&inode)
        })?;
        snapshot
            .get(&keys::xattr(&path, name))?
            .ok_or(Error::NoAttribute)
    }

    /// Names of all attributes in order, those of `trusted.` only with `privileged`.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn listxattr(&self, ino: Ino, privileged: bool) -> Result<Vec<Bytes>> {
        let view = past_rollbacks(&self.namespace, || {
            let inode = self.namespace.inode(ino)?;
            let record = inode.state.read();
            let has_any = record.has(FLAG_XATTRS);
            has_any.then(|| self.xattr_view(&inode)).transpose()
        })?;
        let Some((path, snapshot)) = view else {
            return Ok(Vec::new());
        };
        let lo = keys::xattr(&path, b"");
        let hi = successor_of_prefix(&lo);
        let mut names = Vec::new();
        for item in snapshot.scan(&lo, hi.as_deref()) {
            let name = item?.0.slice(lo.len()..);
            if privileged || !name.starts_with(b"trusted.") {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Removes an attribute. The caller checked permissions. To remove an access control list that
    /// does not exist changes nothing and is no error, as on other file systems.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported`, and those of the tree.
    pub fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        check(name)?;
        past_rollbacks(&self.namespace, || self.removexattr_once(ino, name))
    }

    fn removexattr_once(&self, ino: Ino, name: &[u8]) -> Result<()> {
        let inode = self.namespace.inode(ino)?;
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let protection = self.namespace.protections.of(&inode, tx.get(&inode))?;
        protection.allow_change()?;
        if flag_of(name).is_some_and(|flag| !tx.get(&inode).has(flag)) {
            return Ok(());
        }
        if !tx.get(&inode).has(FLAG_XATTRS) {
            return Err(Error::NoAttribute);
        }
        if !self.has_xattr(&inode, name)? {
            return Err(Error::NoAttribute);
        }
        let topology = self.namespace.topology.read();
        tx.batch.delete(keys::xattr(&topology.path(&inode)?, name));
        let now = self.times.now();
        let record = tx.edit(&inode);
        record.flags &= !(flags_of(name) & !FLAG_XATTRS);
        record.ctime = now;
        tx.apply(&topology, &self.namespace.tree)?
            .make_durable_telling(&self.namespace.caches, || {
                [Invalidation::Attributes(inode.ino)]
            })
    }

    /// Sets the list in this attribute. The caller checked permissions. With `clears_setgid`, the
    /// process is not in the group of the object and lacks `CAP_FSETID`, so that a new access list
    /// clears setgid.
    ///
    /// # Errors
    /// `Unsupported` for another attribute and for symbolic links, `Invalid` for bytes that are no
    /// list, `Access` for a default list of anything but a directory, and those of the tree.
    pub fn set_list(
        &self,
        ino: Ino,
        attribute: &[u8],
        list: &[u8],
        clears_setgid: bool,
    ) -> Result<()> {
        let flag = flag_of(attribute).ok_or(Error::Unsupported)?;
        let list = Acl::decode(list)?;
        past_rollbacks(&self.namespace, || {
            self.set_list_once(ino, (attribute, flag), &list, clears_setgid)
        })
    }

    fn set_list_once(
        &self,
        ino: Ino,
        (attribute, flag): (&[u8], u16),
        list: &Acl,
        clears_setgid: bool,
    ) -> Result<()> {
        let inode = self.namespace.inode(ino)?;
        match inode.kind {
            Kind::Symlink => return Err(Error::Unsupported),
            Kind::Directory => {}
            _ if flag == FLAG_DEFAULT_ACL => return Err(Error::Access),
            _ => {}
        }
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let protection = self.namespace.protections.of(&inode, tx.get(&inode))?;
        protection.allow_change()?;
        let topology = self.namespace.topology.read();
        let key = keys::xattr(&topology.path(&inode)?, attribute);
        let now = self.times.now();
        let record = tx.edit(&inode);
        record.ctime = now;
        let is_access = flag == FLAG_ACL;
        if is_access {
            record.mode = record.mode & !PERMISSION_BITS | list.mode_bits();
        }
        if is_access && clears_setgid {
            record.mode &= !S_ISGID;
        }
        if is_access && list.is_mode() {
            record.flags &= !flag;
            tx.batch.delete(key);
        } else {
            record.flags |= FLAG_XATTRS | flag;
            tx.batch.put(key, list.encode());
        }
        tx.apply(&topology, &self.namespace.tree)?
            .make_durable_telling(&self.namespace.caches, || {
                [Invalidation::Attributes(inode.ino)]
            })
    }
}
