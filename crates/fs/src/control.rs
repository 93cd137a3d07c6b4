//! The control ioctls of a mounted volume: what FUSE has no request for.
//!
//! Every call goes to an open descriptor of a *directory* of the mount (read-only is enough). All
//! structures have a fixed size, as the kernel copies as many bytes as the number says, and are
//! little-endian whatever the machine. Strings are bytes with a length, zero-padded.
//!
//! | number | name | direction | structure |
//! | --- | --- | --- | --- |
//! | 1 | [`CLONE`] | in | [`CloneRequest`] |
//! | 2 | [`REMOVE`] | in | [`NameRequest`] |
//! | 3 | [`SYNC`] | none | |
//! | 4 | [`STAT`] | out | [`decode_stat_reply`] |
//! | 5 | [`CHECKPOINT`] | none | |
//! | 6 | [`SOURCE`] | in, out | [`NameRequest`], answered by [`encode_source_reply`] |
//!
//! The kernel checks no permission for an ioctl; the daemon does, see [`crate::Volume::clone_entry`].
//!
//! A clone has two places and a call has one descriptor. So its source is named first, in a directory that the
//! caller holds open ([`SOURCE`]), and the answer is a *ticket*: a random number that names the source
//! once. An inode number would not do: whoever is confined to a part of the mount, by a bind mount or a chroot, could
//! guess those of the rest.

use crate::error::{Error, Result};

const DIR_IN: u32 = 1;
const DIR_OUT: u32 = 2;
const GROUP: u32 = b'R' as u32;

const fn number(direction: u32, nr: u32, size_bytes: usize) -> u32 {
    assert!(
        size_bytes < 1 << 14,
        "the kernel gives the size of an ioctl 14 bits"
    );
    (direction << 30) | ((size_bytes as u32) << 16) | (GROUP << 8) | nr
}

/// Longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
const NAME_FIELD_BYTES: usize = 256;
/// Size of an encoded [`CloneRequest`].
pub const CLONE_BYTES: usize = 16 + NAME_FIELD_BYTES;
/// Size of an encoded [`NameRequest`].
pub const NAME_REQUEST_BYTES: usize = 8 + NAME_FIELD_BYTES;
/// Size of the answer to [`STAT`].
pub const STAT_BYTES: usize = 16 * 1024 - 4;

/// Clones a file or a directory tree to a name in the directory the call is made on.
pub const CLONE: u32 = number(DIR_IN, 1, CLONE_BYTES);
/// Removes a name in the directory the call is made on, with everything below it.
pub const REMOVE: u32 = number(DIR_IN, 2, NAME_REQUEST_BYTES);
/// Makes everything that was handed to the daemon before the call durable.
pub const SYNC: u32 = number(0, 3, 0);
/// Tells the counters of the volume, as JSON.
pub const STAT: u32 = number(DIR_OUT, 4, STAT_BYTES);
/// Writes a checkpoint and waits for it.
pub const CHECKPOINT: u32 = number(0, 5, 0);
/// Gives a ticket for a name in the directory the call is made on, or for that directory (`.`). The caller needs
/// search on it.
pub const SOURCE: u32 = number(DIR_IN | DIR_OUT, 6, NAME_REQUEST_BYTES);

/// Flag of [`CloneRequest`]: fail with `EEXIST` when the destination exists.
pub const CLONE_NO_REPLACE: u32 = 1;

/// What [`CLONE`] asks for. The directory of the call is the destination's parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneRequest {
    /// [`CLONE_NO_REPLACE`] or 0.
    pub flags: u32,
    /// Ticket of the source, the answer to [`SOURCE`]. It serves once, and only its user.
    pub source: u64,
    /// Name of the destination: 1 to 255 bytes, no NUL, no `/`.
    pub name: Vec<u8>,
}

impl CloneRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; CLONE_BYTES]> {
        let mut out = [0; CLONE_BYTES];
        out[0..4].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.source.to_le_bytes());
        let name_len = put_name(&mut out[16..], &self.name)?;
        out[4..8].copy_from_slice(&name_len.to_le_bytes());
        Ok(out)
    }

    /// Reads what [`CloneRequest::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` when the size, a flag or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != CLONE_BYTES {
            return Err(Error::Invalid("size of a clone request"));
        }
        let flags = u32_at(bytes, 0);
        if flags & !CLONE_NO_REPLACE != 0 {
            return Err(Error::Invalid("unknown flag of a clone request"));
        }
        let name = take_name(&bytes[16..], u32_at(bytes, 4))?;
        let source = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        Ok(Self {
            flags,
            source,
            name,
        })
    }
}

/// What [`REMOVE`] and [`SOURCE`] ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRequest {
    /// 1 to 255 bytes, no NUL, no `/`.
    pub name: Vec<u8>,
}

impl NameRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; NAME_REQUEST_BYTES]> {
        let mut out = [0; NAME_REQUEST_BYTES];
        let name_len = put_name(&mut out[8..], &self.name)?;
        out[4..8].copy_from_slice(&name_len.to_le_bytes());
        Ok(out)
    }

    /// Reads what [`NameRequest::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` when the size, a flag or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != NAME_REQUEST_BYTES {
            return Err(Error::Invalid("size of a request by name"));
        }
        if u32_at(bytes, 0) != 0 {
            return Err(Error::Invalid("unknown flag of a request by name"));
        }
        Ok(Self {
            name: take_name(&bytes[8..], u32_at(bytes, 4))?,
        })
    }
}

/// The bytes that answer [`SOURCE`].
#[must_use]
pub fn encode_source_reply(ticket: u64) -> [u8; NAME_REQUEST_BYTES] {
    let mut out = [0; NAME_REQUEST_BYTES];
    out[..8].copy_from_slice(&ticket.to_le_bytes());
    out
}

/// The ticket in an answer to [`SOURCE`].
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_source_reply(bytes: &[u8]) -> Result<u64> {
    let ticket = bytes.first_chunk().copied().map(u64::from_le_bytes);
    ticket.ok_or(Error::Invalid("answer to a source request"))
}

/// The bytes that answer [`STAT`]: the length of the JSON text, then the text.
///
/// # Errors
/// `Range` when the text does not fit.
pub fn encode_stat_reply(json: &str) -> Result<Vec<u8>> {
    if json.len() > STAT_BYTES - 4 {
        return Err(Error::Range);
    }
    let mut out = vec![0; STAT_BYTES];
    let len = u32::try_from(json.len()).map_err(|_| Error::Range)?;
    out[0..4].copy_from_slice(&len.to_le_bytes());
    out[4..4 + json.len()].copy_from_slice(json.as_bytes());
    Ok(out)
}

/// The JSON text (an encoded [`crate::VolumeStats`]) in an answer to [`STAT`].
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_stat_reply(bytes: &[u8]) -> Result<&str> {
    let invalid = Error::Invalid("answer to a stat request");
    let Some(len) = bytes.first_chunk::<4>() else {
        return Err(invalid);
    };
    let end = 4usize.saturating_add(u32::from_le_bytes(*len) as usize);
    let text = bytes.get(4..end).ok_or(invalid.clone())?;
    std::str::from_utf8(text).map_err(|_| invalid)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn put_name(field: &mut [u8], name: &[u8]) -> Result<u32> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    field[..name.len()].copy_from_slice(name);
    u32::try_from(name.len()).map_err(|_| Error::NameTooLong)
}

fn take_name(field: &[u8], len: u32) -> Result<Vec<u8>> {
    let len = len as usize;
    if len > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    let name = &field[..len];
    if name.is_empty() || name.contains(&0) || name.contains(&b'/') || name == b".." {
        return Err(Error::Invalid("name in a control request"));
    }
    Ok(name.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_encoding() {
        let clone = CloneRequest {
            flags: CLONE_NO_REPLACE,
            source: 0x0123_4567_89ab_cdef,
            name: vec![0xff; 255],
        };
        let bytes = clone.encode().unwrap();
        assert_eq!(
            bytes[..20],
            [
                1, 0, 0, 0, 255, 0, 0, 0, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 1, 255, 255,
                255, 255
            ]
        );
        assert_eq!(CloneRequest::decode(&bytes).unwrap(), clone);
        let remove = NameRequest {
            name: b"x".to_vec(),
        };
        assert_eq!(
            NameRequest::decode(&remove.encode().unwrap()).unwrap(),
            remove
        );
        let stat = encode_stat_reply("{}").unwrap();
        assert_eq!(decode_stat_reply(&stat).unwrap(), "{}");
    }

    #[test]
    fn ioctl_numbers_are_pinned() {
        assert_eq!(
            [CLONE, REMOVE, SYNC, STAT, CHECKPOINT, SOURCE],
            [
                0x4110_5201,
                0x4108_5202,
                0x5203,
                0xbffc_5204,
                0x5205,
                0xc108_5206
            ]
        );
    }

    #[test]
    fn bad_requests_are_refused() {
        assert!(matches!(
            CloneRequest::decode(&[0; 3]),
            Err(Error::Invalid(_))
        ));
        for name in [&b""[..], b"..", b"a/b", b"a\0b"] {
            let bytes = NameRequest {
                name: name.to_vec(),
            }
            .encode()
            .unwrap();
            assert!(
                matches!(NameRequest::decode(&bytes), Err(Error::Invalid(_))),
                "{name:?}"
            );
        }
        let mut bytes = NameRequest {
            name: b"x".to_vec(),
        }
        .encode()
        .unwrap();
        bytes[4] = 0;
        bytes[5] = 1;
        assert!(matches!(
            NameRequest::decode(&bytes),
            Err(Error::NameTooLong)
        ));
    }
}
