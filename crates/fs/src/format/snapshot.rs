//! Snapshots of the volume: their names and records, and the policy by which they are made.
//!
//! A snapshot is a clone of the root's range that nothing changes. Its record tells its id, which
//! its keys have ([`crate::format::keys::snapshot_base`]), and its moment.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys::SNAPSHOT_IDS_MAX;
use crate::format::name::NAME_BYTES_MAX;
use crate::format::record::Time;

/// A period after which the policy makes a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// An hour.
    Hourly,
    /// A day, as UTC counts days.
    Daily,
    /// Seven days.
    Weekly,
    /// Thirty days.
    Monthly,
}

impl Period {
    /// All periods.
    pub const ALL: [Self; 4] = [Self::Hourly, Self::Daily, Self::Weekly, Self::Monthly];

    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        ["hourly", "daily", "weekly", "monthly"][self as usize]
    }

    fn secs(self) -> i64 {
        const DAY: i64 = 24 * 60 * 60;
        [60 * 60, DAY, 7 * DAY, 30 * DAY][self as usize]
    }

    /// Number of the period that a time lies in.
    pub(crate) fn number_at(self, time: Time) -> i64 {
        time.secs.div_euclid(self.secs())
    }
}

/// The maker of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadeBy {
    /// A user.
    User,
    /// A rollback, which keeps the state before it.
    Rollback,
    /// The policy, for this period.
    Policy(Period),
}

impl MadeBy {
    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Rollback => "rollback",
            Self::Policy(period) => period.word(),
        }
    }

    fn encode(self) -> u8 {
        match self {
            Self::User => 0,
            Self::Rollback => 1,
            Self::Policy(period) => 2 + period as u8,
        }
    }

    fn decode(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::User),
            1 => Some(Self::Rollback),
            policy => {
                let period = Period::ALL.get(usize::from(policy - 2))?;
                Some(Self::Policy(*period))
            }
        }
    }
}

/// The record of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotRecord {
    /// Number that no other snapshot of the volume ever had.
    pub(crate) id: u64,
    /// The moment: the snapshot has every change of a file up to this sequence number of the
    /// journal, and none behind it.
    pub(crate) seq: u64,
    /// Time by the clock.
    pub(crate) time: Time,
    pub(crate) made_by: MadeBy,
}

fn corrupt(what: &'static str, bytes: &[u8]) -> Error {
    Error::Corrupt {
        what,
        detail: format!("{bytes:?}"),
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl SnapshotRecord {
    const BYTES: usize = 32;

    /// The bytes: id (8), sequence number (8), seconds (8), nanoseconds (4), maker (1), reserved
    /// (3).
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.time.secs.to_le_bytes());
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        out.extend_from_slice(&[self.made_by.encode(), 0, 0, 0]);
        out.into()
    }

    /// Reads the bytes of [`SnapshotRecord::encode`].
    ///
    /// # Errors
    /// `Corrupt` for any others.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let read = || {
            let [maker, 0, 0, 0] = *bytes.get(28..)? else {
                return None;
            };
            let nanos = u32::from_le_bytes(bytes[24..28].try_into().ok()?);
            let id = u64_at(bytes, 0)?;
            (nanos < 1_000_000_000 && id < SNAPSHOT_IDS_MAX).then_some(())?;
            Some(Self {
                id,
                seq: u64_at(bytes, 8)?,
                time: Time {
                    secs: u64_at(bytes, 16)?.cast_signed(),
                    nanos,
                },
                made_by: MadeBy::decode(maker)?,
            })
        };
        read().ok_or_else(|| corrupt("record of a snapshot", bytes))
    }
}

/// The counts of snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SnapshotCounts {
    /// The next id.
    pub(crate) next_id: u64,
    /// Snapshots that there are.
    pub(crate) count: u64,
}

impl SnapshotCounts {
    pub(crate) fn encode(self) -> Bytes {
        [self.next_id, self.count]
            .map(u64::to_le_bytes)
            .concat()
            .into()
    }

    /// Reads the counts. A volume that never had a snapshot has none.
    ///
    /// # Errors
    /// `Corrupt` for other bytes than sixteen.
    pub(crate) fn decode(bytes: Option<&Bytes>) -> Result<Self> {
        let Some(bytes) = bytes else {
            return Ok(Self::default());
        };
        match (u64_at(bytes, 0), u64_at(bytes, 8), bytes.len()) {
            (Some(next_id), Some(count), 16) => Ok(Self { next_id, count }),
            _ => Err(corrupt("counts of snapshots", bytes)),
        }
    }
}

/// Refuses a name that no snapshot can have. A name is text, since it stands in a line of options
/// and on terminals: up to 255 bytes, without control characters, `/`, `,`, `"` and blanks at its
/// ends.
///
/// # Errors
/// `NameTooLong`, and `Invalid` for any other reason.
pub fn check_snapshot_name(name: &str) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    let is_odd = |c: char| c.is_control() || ['/', ',', '"'].contains(&c);
    let is_no_name = name.is_empty() || name == "." || name == "..";
    if is_no_name || name.trim() != name || name.chars().any(is_odd) {
        return Err(Error::Invalid("name of a snapshot"));
    }
    Ok(())
}

/// How many snapshots of each period the policy keeps; 0 makes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    keep: [u32; 4],
}

impl Policy {
    /// Snapshots of this period that are kept.
    #[must_use]
    pub fn keep(&self, period: Period) -> u32 {
        self.keep[period as usize]
    }

    /// Whether it makes none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keep == [0; 4]
    }
}

/// The words of a policy that do not make sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no part of a policy: give some of hourly=N,daily=N,weekly=N,monthly=N, or none")]
pub struct PolicyError(String);

/// Most snapshots of a period.
const KEPT_MAX: u32 = 100_000;

impl FromStr for Policy {
    type Err = PolicyError;

    /// Reads `hourly=24,daily=7,weekly=4`; `none` is the empty policy.
    fn from_str(text: &str) -> std::result::Result<Self, PolicyError> {
        let mut policy = Self::default();
        if text.trim() == "none" {
            return Ok(policy);
        }
        for part in text.split(',') {
            let wrong = || PolicyError(part.trim().to_owned());
            let (word, count) = part.trim().split_once('=').ok_or_else(wrong)?;
            let period = Period::ALL.into_iter().find(|p| p.word() == word);
            let period = period.ok_or_else(wrong)?;
            let count: u32 = count.parse().map_err(|_| wrong())?;
            if count > KEPT_MAX || policy.keep(period) > 0 {
                return Err(wrong());
            }
            policy.keep[period as usize] = count;
        }
        Ok(policy)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = Period::ALL.into_iter().filter(|p| self.keep(*p) > 0);
        let parts: Vec<_> = kept
            .map(|period| format!("{}={}", period.word(), self.keep(period)))
            .collect();
        match parts.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&parts.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: SnapshotRecord = SnapshotRecord {
        id: 0x0102,
        seq: 0x0a0b0c,
        time: Time {
            secs: 0x6543_2100,
            nanos: 7,
        },
        made_by: MadeBy::Policy(Period::Daily),
    };

    #[test]
    fn records_are_pinned_and_damaged_ones_are_corrupt() {
        let bytes = SAMPLE.encode();
        assert_eq!(
            bytes[..],
            [
                2, 1, 0, 0, 0, 0, 0, 0, 0x0c, 0x0b, 0x0a, 0, 0, 0, 0, 0, 0, 0x21, 0x43, 0x65, 0, 0,
                0, 0, 7, 0, 0, 0, 3, 0, 0, 0
            ]
        );
        assert_eq!(SnapshotRecord::decode(&bytes).unwrap(), SAMPLE);
        for len in (0..bytes.len()).chain([33]) {
            let mut cut = bytes.to_vec();
            cut.resize(len, 0);
            let found = SnapshotRecord::decode(&cut);
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{len}");
        }
        for (at, byte) in [(28, 6), (28, 255), (29, 1), (31, 1), (27, 0x80), (7, 1)] {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            let found = SnapshotRecord::decode(&bytes);
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{at}");
        }
        let counts = SnapshotCounts {
            next_id: 3,
            count: 2,
        };
        let bytes = counts.encode();
        assert_eq!(bytes[..], [3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(SnapshotCounts::decode(Some(&bytes)).unwrap(), counts);
        let short = SnapshotCounts::decode(Some(&bytes.slice(1..)));
        assert!(matches!(short, Err(Error::Corrupt { .. })));
    }

    #[test]
    fn policies_are_text() {
        let policy: Policy = "hourly=24, daily=7,weekly=4".parse().unwrap();
        assert_eq!(policy.to_string(), "hourly=24,daily=7,weekly=4");
        assert_eq!(policy.keep(Period::Monthly), 0);
        assert_eq!("none".parse::<Policy>().unwrap().to_string(), "none");
        for wrong in [
            "",
            "hourly",
            "hourly=x",
            "yearly=1",
            "daily=1,daily=2",
            "daily=-1",
        ] {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_of_snapshots_are_plain_text() {
        for good in ["daily", "before the upgrade", "2026-11-25T22:00", "ä"] {
            check_snapshot_name(good).unwrap();
        }
        let long = "x".repeat(256);
        for bad in [
            "", ".", "..", "a/b", "a,b", "a\nb", "a\0", " a", "a ", "a\"b", &long,
        ] {
            assert!(check_snapshot_name(bad).is_err(), "{bad:?}");
        }
    }
}
