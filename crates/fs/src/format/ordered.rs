//! Ordered numbers: short encodings that sort by the number.
//!
//! A byte with the count of bytes that follow, and those bytes of the number, big-endian and without
//! leading zeros: 300 is `02 01 2c`, 0 is `00`.

use crate::format::ino::{Identity, Ino};

/// The encoding of one number.
pub(crate) struct Ordered {
    bytes: [u8; 9],
    len: usize,
}

impl Ordered {
    pub(crate) fn new(number: u64) -> Self {
        let all = number.to_be_bytes();
        let zeros = usize::try_from(number.leading_zeros() / 8).expect("at most eight");
        let len = all.len() - zeros;
        let mut bytes = [0; 9];
        bytes[0] = u8::try_from(len).expect("at most eight");
        bytes[1..=len].copy_from_slice(&all[zeros..]);
        Self {
            bytes,
            len: 1 + len,
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Appends a number.
pub(crate) fn push_ordered(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(Ordered::new(number).as_bytes());
}

/// Reads a number, and steps over it; `None` for bytes that [`push_ordered`] does not write.
pub(crate) fn take_ordered(bytes: &mut &[u8]) -> Option<u64> {
    let (len, rest) = bytes.split_first()?;
    let len = usize::from(*len);
    if len > 8 || rest.len() < len || rest[..len].first() == Some(&0) {
        return None;
    }
    let mut all = [0; 8];
    all[8 - len..].copy_from_slice(&rest[..len]);
    *bytes = &rest[len..];
    Some(u64::from_be_bytes(all))
}

/// Appends number and generation of an inode.
pub(crate) fn push_identity(bytes: &mut Vec<u8>, identity: Identity) {
    push_ordered(bytes, identity.ino.0);
    push_ordered(bytes, identity.generation);
}

/// Reads number and generation of an inode, and steps over them.
pub(crate) fn take_identity(bytes: &mut &[u8]) -> Option<Identity> {
    Some(Identity {
        ino: Ino(take_ordered(bytes)?),
        generation: take_ordered(bytes)?,
    })
}
