//! Notes of clone roots, as they are stored: 1 byte of kind, and for removed links the time of the
//! removal, as seconds (8, signed) and nanoseconds (4). Little-endian.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::record::{NANOS_PER_SEC, Time};

const UNCOUNTED: u8 = 1;
const REMOVED: u8 = 2;
const REMOVED_BYTES: usize = 13;

/// A note of a clone root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// The shared inodes came from another clone root. Those whose counts are older than the note
    /// have as many links as the link index tells, and those without any are not used.
    Uncounted,
    /// Link entries were removed with a tree. They are not subtracted from counts that are older
    /// than the note.
    Removed {
        /// The time of the removal.
        at: Time,
    },
}

impl Note {
    pub(crate) fn encode(self) -> Bytes {
        match self {
            Self::Uncounted => Bytes::from_static(&[UNCOUNTED]),
            Self::Removed { at } => {
                let mut out = Vec::with_capacity(REMOVED_BYTES);
                out.push(REMOVED);
                out.extend_from_slice(&at.secs.to_le_bytes());
                out.extend_from_slice(&at.nanos.to_le_bytes());
                out.into()
            }
        }
    }

    /// Reads a note.
    ///
    /// # Errors
    /// `Corrupt` for anything that `encode` does not write.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let corrupt = || Error::Corrupt {
            what: "note of a clone root",
            detail: format!("{bytes:?}"),
        };
        match bytes {
            [UNCOUNTED] => Ok(Self::Uncounted),
            [REMOVED, rest @ ..] if bytes.len() == REMOVED_BYTES => {
                let (secs, nanos) = rest.split_at(8);
                let nanos = u32::from_le_bytes(nanos.try_into().map_err(|_| corrupt())?);
                let secs = i64::from_le_bytes(secs.try_into().map_err(|_| corrupt())?);
                if nanos >= NANOS_PER_SEC {
                    return Err(corrupt());
                }
                Ok(Self::Removed {
                    at: Time { secs, nanos },
                })
            }
            _ => Err(corrupt()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_of_notes() {
        let at = Time { secs: -1, nanos: 7 };
        let mut removed = vec![2];
        removed.extend([0xff; 8]);
        removed.extend([7, 0, 0, 0]);
        for (note, bytes) in [
            (Note::Uncounted, vec![1]),
            (Note::Removed { at }, removed.clone()),
        ] {
            assert_eq!(note.encode(), bytes);
            assert_eq!(Note::decode(&bytes).unwrap(), note);
            for len in 0..bytes.len() {
                assert!(Note::decode(&bytes[..len]).is_err(), "{len}");
            }
        }
        removed[12] = 0xff;
        assert!(Note::decode(&removed).is_err());
        assert!(Note::decode(&[3]).is_err());
    }
}
