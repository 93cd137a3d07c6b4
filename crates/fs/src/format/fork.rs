//! Records of forks: clones that know their origin.
//!
//! The key of a record has the identity of the top of the fork, which stays when the fork is
//! renamed ([`crate::format::keys::fork_record`]).
//!
//! A snapshot of the volume may have the top, and a rollback to it brings the top back. So a record
//! tells between which snapshots the top was there, and stays as long as one of these does.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys::SNAPSHOT_IDS_MAX;
use crate::format::record::Time;

/// Longest note, in bytes.
pub(crate) const NOTE_BYTES_MAX: usize = 255;
/// Longest path of an origin that is stored, in bytes.
pub(crate) const ORIGIN_PATH_BYTES_MAX: usize = 4096;

/// The end of the snapshots that may have a top which is still there.
const THERE: u64 = u64::MAX;

/// The record of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForkRecord {
    /// Number that no other fork of the volume ever had. It stays when the fork is reset.
    pub(crate) id: u64,
    /// Id of the base. No other record has it.
    pub(crate) base: Option<u64>,
    /// Snapshots with a smaller id were made before the top.
    pub(crate) made_at: u64,
    /// Snapshots with this id and larger ones were made when the top was gone, unless it came back
    /// by a rollback.
    pub(crate) gone_at: Option<u64>,
    /// The source, when it was forked.
    pub(crate) origin: Identity,
    /// Id of the source, if that was a fork itself.
    pub(crate) origin_fork: Option<u64>,
    /// Names that led to the source when it was forked, from the root, joined by `/`. A longer path
    /// is empty.
    pub(crate) origin_path: Bytes,
    /// Time of the fork by the clock.
    pub(crate) time: Time,
    /// User that made the fork.
    pub(crate) uid: u32,
    /// Text of the user.
    pub(crate) note: String,
}

impl ForkRecord {
    /// Bytes before note and path.
    const HEAD_BYTES: usize = 80;

    /// The bytes: id (8), number (8) and generation (8) of the origin, its id as a fork or 0 (8),
    /// seconds (8), id of the base or 0 (8), id of the first snapshot that may have the top (8),
    /// end of those ids or the largest number (8), nanoseconds (4), user (4), length of the note
    /// (1), reserved (1), length of the path (2), reserved (4), note, path.
    pub(crate) fn encode(&self) -> Bytes {
        let note = self.note.as_bytes();
        let note_len = u8::try_from(note.len()).expect("a note has up to 255 bytes");
        let path_len = u16::try_from(self.origin_path.len()).expect("a stored path is short");
        let mut out = Vec::with_capacity(Self::HEAD_BYTES + note.len() + self.origin_path.len());
        for number in [
            self.id,
            self.origin.ino.0,
            self.origin.generation,
            self.origin_fork.unwrap_or(0),
            self.time.secs.cast_unsigned(),
            self.base.unwrap_or(0),
            self.made_at,
            self.gone_at.unwrap_or(THERE),
        ] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        out.extend_from_slice(&self.uid.to_le_bytes());
        out.extend_from_slice(&[note_len, 0]);
        out.extend_from_slice(&path_len.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(note);
        out.extend_from_slice(&self.origin_path);
        out.into()
    }

    /// Reads the bytes of [`ForkRecord::encode`].
    ///
    /// # Errors
    /// `Corrupt` for any others.
    pub(crate) fn decode(bytes: &Bytes) -> Result<Self> {
        Self::read(bytes).ok_or_else(|| Error::Corrupt {
            what: "record of a fork",
            detail: format!("{bytes:?}"),
        })
    }

    fn read(bytes: &Bytes) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let half = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let [note_len, 0, path_len_low, path_len_high, 0, 0, 0, 0] = *bytes.get(72..80)? else {
            return None;
        };
        let note_end = Self::HEAD_BYTES + usize::from(note_len);
        let path_len = usize::from(u16::from_le_bytes([path_len_low, path_len_high]));
        let is_whole = bytes.len() == note_end + path_len && path_len <= ORIGIN_PATH_BYTES_MAX;
        let (id, nanos, gone_at) = (number(0)?, half(64)?, number(56)?);
        (is_whole && nanos < 1_000_000_000 && is_fork_id(id)).then_some(())?;
        let (origin_fork, base) = (number(24)?, number(40)?);
        let is_none_or_id = |id| id == 0 || is_fork_id(id);
        (is_none_or_id(origin_fork) && is_none_or_id(base)).then_some(())?;
        let note = std::str::from_utf8(&bytes[Self::HEAD_BYTES..note_end]).ok()?;
        Some(Self {
            id,
            base: (base != 0).then_some(base),
            made_at: number(48)?,
            gone_at: (gone_at != THERE).then_some(gone_at),
            origin: Identity {
                ino: Ino(number(8)?),
                generation: number(16)?,
            },
            origin_fork: (origin_fork != 0).then_some(origin_fork),
            origin_path: bytes.slice(note_end..),
            time: Time {
                secs: number(32)?.cast_signed(),
                nanos,
            },
            uid: half(68)?,
            note: note.to_owned(),
        })
    }
}

/// Whether a fork can have this id: it is a generation, and fits into the keys of a base.
pub(crate) fn is_fork_id(id: u64) -> bool {
    (1..SNAPSHOT_IDS_MAX).contains(&id)
}

/// Refuses a note that no fork can have. A note is text of up to 255 bytes without control
/// characters.
///
/// # Errors
/// `NameTooLong`, and `Invalid` for any other reason.
pub fn check_note(note: &str) -> Result<()> {
    if note.len() > NOTE_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    match note.chars().any(char::is_control) {
        true => Err(Error::Invalid("note of a fork")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> ForkRecord {
        ForkRecord {
            id: 0x0102,
            base: Some(0x0103),
            made_at: 4,
            gone_at: Some(5),
            origin: Identity {
                ino: Ino(0x0a0b),
                generation: 3,
            },
            origin_fork: Some(0x0100),
            origin_path: Bytes::from_static(b"a/\xff"),
            time: Time {
                secs: 0x6543_2100,
                nanos: 7,
            },
            uid: 1000,
            note: "try".to_owned(),
        }
    }

    #[test]
    fn records_of_forks_are_pinned_and_damaged_ones_are_corrupt() {
        let bytes = sample().encode();
        let golden = b"\x02\x01\0\0\0\0\0\0\x0b\x0a\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\
                       \0\x01\0\0\0\0\0\0\0\x21\x43\x65\0\0\0\0\
                       \x03\x01\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\
                       \x07\0\0\0\xe8\x03\0\0\x03\0\x03\0\0\0\0\0trya/\xff";
        assert_eq!(bytes[..], golden[..]);
        assert_eq!(ForkRecord::decode(&bytes).unwrap(), sample());
        let plain = ForkRecord {
            origin_fork: None,
            origin_path: Bytes::new(),
            note: String::new(),
            base: None,
            gone_at: None,
            ..sample()
        };
        assert_eq!(ForkRecord::decode(&plain.encode()).unwrap(), plain);
        for len in (0..bytes.len()).chain([bytes.len() + 1]) {
            let mut cut = bytes.to_vec();
            cut.resize(len, 0);
            let found = ForkRecord::decode(&cut.into());
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{len}");
        }
        // Reserved bytes, nanoseconds, ids, lengths, text.
        for (at, byte) in [
            (73, 1),
            (76, 1),
            (79, 1),
            (67, 0x80),
            (7, 1),
            (31, 1),
            (47, 1),
            (72, 4),
            (74, 2),
            (75, 0x20),
            (80, 0xff),
        ] {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            let found = ForkRecord::decode(&bytes.into());
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{at}");
        }
        let mut no_id = bytes.to_vec();
        no_id[..8].fill(0);
        assert!(ForkRecord::decode(&no_id.into()).is_err());
    }

    #[test]
    fn notes_are_text_in_one_line() {
        for good in ["", "before the upgrade", "ä, \"b\" / c"] {
            check_note(good).unwrap();
        }
        assert!(matches!(
            check_note(&"x".repeat(256)),
            Err(Error::NameTooLong)
        ));
        for bad in ["a\nb", "\x1b[31m", "a\0"] {
            assert!(matches!(check_note(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
