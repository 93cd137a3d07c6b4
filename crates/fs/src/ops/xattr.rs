//! Extended attributes.

use bytes::Bytes;
use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::NAME_BYTES_MAX;
use crate::format::record::{FLAG_CAPABILITY, FLAG_XATTRS};
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
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

fn check(name: &[u8]) -> Result<()> {
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

impl Attributes {
    /// Sets an attribute. The caller checked permissions.
    ///
    /// # Errors
    /// `Exists`, `NoAttribute`, `AttributeTooBig`, `Unsupported` outside of `user.`, `trusted.` and
    /// `security.`, and those of the tree.
    pub fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], mode: SetXattr) -> Result<()> {
        check(name)?;
        if value.len() > XATTR_BYTES_MAX {
            return Err(Error::AttributeTooBig);
        }
        let inode = self.namespace.inode(ino)?;
        self.namespace.tree.admit(value.len() + RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let exists = mode != SetXattr::Any
            && tx.get(&inode).has(FLAG_XATTRS)
            && self.has_xattr(ino, name)?;
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
        record.flags |= FLAG_XATTRS;
        if name == b"security.capability" {
            record.flags |= FLAG_CAPABILITY;
        }
        record.ctime = now;
        tx.apply(&topology, &self.namespace.tree)
    }

    /// Path and snapshot of an inode whose state is locked.
    fn xattr_view(&self, ino: Ino) -> Result<(Bytes, Snapshot)> {
        let inode = self.namespace.inode(ino)?;
        let topology = self.namespace.topology.read();
        Ok((topology.path(&inode)?, self.namespace.tree.snapshot()))
    }

    fn has_xattr(&self, ino: Ino, name: &[u8]) -> Result<bool> {
        let (path, snapshot) = self.xattr_view(ino)?;
        Ok(snapshot.get(&keys::xattr(&path, name))?.is_some())
    }

    /// Value of an attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported`, and those of the tree.
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        check(name)?;
        let inode = self.namespace.inode(ino)?;
        let (path, snapshot) = {
            let record = inode.state.read();
            if !record.has(FLAG_XATTRS) {
                return Err(Error::NoAttribute);
            }
            self.xattr_view(ino)?
        };
        snapshot
            .get(&keys::xattr(&path, name))?
            .ok_or(Error::NoAttribute)
    }

    /// Names of all attributes in order, those of `trusted.` only with `privileged`.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn listxattr(&self, ino: Ino, privileged: bool) -> Result<Vec<Bytes>> {
        let inode = self.namespace.inode(ino)?;
        let (path, snapshot) = {
            let record = inode.state.read();
            if !record.has(FLAG_XATTRS) {
                return Ok(Vec::new());
            }
            self.xattr_view(ino)?
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

    /// Removes an attribute. The caller checked permissions.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported`, and those of the tree.
    pub fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        check(name)?;
        let inode = self.namespace.inode(ino)?;
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        if !tx.get(&inode).has(FLAG_XATTRS) {
            return Err(Error::NoAttribute);
        }
        if !self.has_xattr(ino, name)? {
            return Err(Error::NoAttribute);
        }
        let topology = self.namespace.topology.read();
        tx.batch.delete(keys::xattr(&topology.path(&inode)?, name));
        let now = self.times.now();
        let record = tx.edit(&inode);
        if name == b"security.capability" {
            record.flags &= !FLAG_CAPABILITY;
        }
        record.ctime = now;
        tx.apply(&topology, &self.namespace.tree)
    }
}
