//! Records of snapshots, as they lie in the tree: also those that are damaged.
//!
//! A damaged record hides its own snapshot alone. Its name, as far as that is text, is told, and a
//! removal by that name takes the record, and the keys that no other record leads to: those of the id
//! that its bytes still tell, or, of the last damaged record, those of every id without a record.

use std::collections::BTreeSet;

use bytes::Bytes;
use ramet_betree::{Batch, Seq, Snapshot, Tree, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::name::NAME_BYTES_MAX;
use crate::format::record::Time;
use crate::format::snapshot::{MadeBy, SnapshotRecord, check_snapshot_name};

/// How far ahead of the clock a snapshot may lie and count as one of today: a clock is set back so
/// much without having been wrong, or begins with the time that was stored before the last boot.
const SLACK_SECS: i64 = 60 * 60;

/// A snapshot, as users know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// Its name.
    pub name: String,
    /// Its number. No other snapshot of the volume ever has it, and later ones have larger ones.
    pub id: u64,
    /// Sequence number of the journal: the snapshot has the changes up to it.
    pub seq: Seq,
    /// Time by the clock.
    pub time: Time,
    /// Its maker.
    pub made_by: MadeBy,
}

impl SnapshotEntry {
    pub(super) fn new(name: &str, record: SnapshotRecord) -> Self {
        Self {
            name: name.to_owned(),
            id: record.id,
            seq: record.seq,
            time: record.time,
            made_by: record.made_by,
        }
    }

    /// Whether the policy made it while the clock was ahead of `now`.
    pub(super) fn is_ahead_of(&self, now: Time) -> bool {
        let is_ahead = self.time.secs > now.secs.saturating_add(SLACK_SECS);
        is_ahead && matches!(self.made_by, MadeBy::Policy(_))
    }
}

/// A snapshot that cannot be shown, since its record is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedSnapshot {
    /// The name by which it is removed. Bytes of a name that no snapshot can have are escaped.
    pub name: String,
    /// The damaged part.
    pub damage: &'static str,
    key: Bytes,
    /// The id that the bytes of the record tell.
    id: Option<u64>,
}

/// All records.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Snapshots, in the order in which they were made.
    pub(crate) whole: Vec<SnapshotEntry>,
    pub(crate) damaged: Vec<DamagedSnapshot>,
}

/// A record to remove, and the ids of the snapshots whose keys go with it.
pub(super) struct Removal {
    pub(super) key: Bytes,
    pub(super) ids: Vec<u64>,
}

impl Records {
    /// Reads them.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn read(tree: &Tree) -> Result<Self> {
        let prefix = keys::snapshot_records();
        let end = successor_of_prefix(&prefix);
        let mut records = Self::default();
        for item in tree.scan(&prefix, end.as_deref()) {
            let (key, value) = item?;
            let bytes = &key[prefix.len()..];
            let name = std::str::from_utf8(bytes).ok();
            let name = name.filter(|name| check_snapshot_name(name).is_ok());
            let record = SnapshotRecord::decode(&value);
            if let (Some(name), Ok(record)) = (name, &record) {
                records.whole.push(SnapshotEntry::new(name, *record));
                continue;
            }
            records.damaged.push(DamagedSnapshot {
                name: name.map_or_else(|| escaped(bytes), str::to_owned),
                damage: match record {
                    Ok(_) => "its name is none of a snapshot",
                    Err(_) => "its record is damaged",
                },
                id: value
                    .first_chunk()
                    .map(|id| u64::from_le_bytes(*id))
                    .filter(|id| *id < keys::SNAPSHOT_IDS_MAX),
                key,
            });
        }
        records.whole.sort_unstable_by_key(|entry| entry.id);
        Ok(records)
    }

    /// Number of the records.
    pub(super) fn count(&self) -> u64 {
        (self.whole.len() + self.damaged.len()) as u64
    }

    /// The id behind those of all records and of all keys.
    pub(super) fn next_id(&self, tree: &Tree) -> Result<u64> {
        let of_keys = ids_with_keys(&tree.snapshot())?.last().copied();
        let of_records = self.whole.last().map(|last| last.id);
        Ok(of_keys.max(of_records).map_or(0, |last| last + 1))
    }
}

/// The record with this name, as [`SnapshotEntry`] and [`DamagedSnapshot`] tell it.
///
/// # Errors
/// Those of the tree.
pub(super) fn removal_of(tree: &Tree, name: &str) -> Result<Option<Removal>> {
    let key = keys::snapshot_record(name);
    let record = tree.get(&key)?.map(|value| SnapshotRecord::decode(&value));
    if let Some(Ok(record)) = record {
        let ids = vec![record.id];
        return Ok(Some(Removal { key, ids }));
    }
    let Records { whole, mut damaged } = Records::read(tree)?;
    let Some(at) = damaged.iter().position(|one| one.name == name) else {
        return Ok(None);
    };
    let DamagedSnapshot { key, id, .. } = damaged.swap_remove(at);
    let mut without = ids_with_keys(&tree.snapshot())?;
    for entry in &whole {
        without.remove(&entry.id);
    }
    let ids = match id.filter(|id| without.contains(id)) {
        Some(id) => vec![id],
        None if damaged.is_empty() => without.into_iter().collect(),
        None => Vec::new(),
    };
    Ok(Some(Removal { key, ids }))
}

/// Ids of the snapshots that have keys.
///
/// # Errors
/// Those of the tree.
fn ids_with_keys(tree: &Snapshot) -> Result<BTreeSet<u64>> {
    let mut all = BTreeSet::new();
    for index in keys::INDEXES {
        all.extend(ids_in(tree, index)?.0);
    }
    Ok(all)
}

/// Ids of the snapshots that have keys in an index, and the first key there that is none of a
/// snapshot: keys behind that are not looked at.
///
/// # Errors
/// Those of the tree.
pub(crate) fn ids_in(tree: &Snapshot, index: u8) -> Result<(Vec<u64>, Option<Bytes>)> {
    let (mut ids, mut rest) = (Vec::new(), keys::snapshots(index));
    let end = successor_of_prefix(&rest);
    // One lookup for each snapshot: the keys of the next one begin behind those of this one.
    while let Some(key) = first_key(tree, &rest, end.as_ref())? {
        let Some((id, _)) = keys::in_snapshot(&key) else {
            return Ok((ids, Some(key)));
        };
        ids.push(id);
        let all = [&[index], &keys::snapshot_base(id)[..]].concat();
        rest = successor_of_prefix(&all).expect("an index is small");
    }
    Ok((ids, None))
}

/// Clones ranges of the files, with their indexes, as they are in the snapshot with this id to their
/// places in the live tree.
///
/// # Errors
/// `Range` for an id that no snapshot has.
pub(crate) fn bring_back(
    batch: &mut Batch,
    id: u64,
    ranges: impl IntoIterator<Item = (u8, Bytes, Bytes)>,
) -> Result<()> {
    let base = keys::snapshot_base(id);
    let inside = |key: &[u8]| [&key[..1], &base, &key[1..]].concat();
    let strip = u32::try_from(1 + base.len()).map_err(|_| Error::Range)?;
    for (index, lo, hi) in ranges {
        batch.clone_range(inside(&lo), Some(inside(&hi).into()), strip, vec![index]);
    }
    Ok(())
}

fn first_key(tree: &Snapshot, lo: &[u8], hi: Option<&Bytes>) -> Result<Option<Bytes>> {
    let mut scan = tree.scan(lo, hi.map(|hi| &hi[..]));
    Ok(scan.next().transpose()?.map(|(key, _)| key))
}

/// Bytes that are no name of a snapshot, as text that could be one.
fn escaped(bytes: &[u8]) -> String {
    let is_dots = bytes.iter().all(|byte| *byte == b'.');
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"/,\"\\".contains(&byte) && !is_dots;
    let text = bytes.iter().map(|byte| match is_plain(*byte) {
        true => char::from(*byte).to_string(),
        false => format!("\\x{byte:02x}"),
    });
    let mut text: String = text.collect();
    if text.is_empty() {
        text.push_str("\\x");
    }
    text.truncate(NAME_BYTES_MAX);
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_betree::Batch;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::snapshot::Period;
    use crate::{
        Error, FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO, SnapshotRequest, Volume,
        answer_snapshots,
    };

    /// A volume with the snapshots `one`, `two` and `three`, changed by `forge`.
    fn volume(forge: impl FnOnce(&mut Batch)) -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 26));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        for name in ["one", "two", "three"] {
            let new = NewInode::new(Kind::Regular, 0o644);
            let file = name.as_bytes();
            volume.names().create(ROOT_INO, file, &new).unwrap();
            volume.snapshots().create(name).unwrap();
        }
        let mut batch = Batch::new();
        forge(&mut batch);
        if !batch.is_empty() {
            volume.tree().apply(batch).unwrap();
        }
        volume
    }

    fn names(volume: &Volume) -> (Vec<String>, Vec<String>) {
        let records = volume.snapshots().records().unwrap();
        let whole = records.whole.into_iter().map(|entry| entry.name);
        let damaged = records.damaged.into_iter().map(|one| one.name);
        (whole.collect(), damaged.collect())
    }

    fn findings(volume: &Volume) -> Vec<String> {
        let findings = volume.controls().check().unwrap();
        let told = findings.into_iter();
        told.map(|found| format!("{} {}", found.invariant, found.detail))
            .collect()
    }

    /// Ids that have keys.
    fn ids(volume: &Volume) -> Vec<u64> {
        let ids = ids_with_keys(&volume.tree().snapshot()).unwrap();
        ids.into_iter().collect()
    }

    #[test]
    fn damaged_record_hides_its_own_snapshot_alone_and_can_be_removed() {
        let volume = volume(|batch| batch.put(keys::snapshot_record("two"), "x"));
        let snapshots = volume.snapshots();
        let told: Vec<_> = snapshots.list().unwrap();
        let told: Vec<_> = told.iter().map(|entry| &*entry.name).collect();
        assert_eq!(told, ["one", "three"]);
        let list = SnapshotRequest::List {
            from: 0,
            exclusive: true,
        };
        let reply = answer_snapshots(snapshots, &list).unwrap();
        assert_eq!((reply.snapshots.len(), reply.damaged_count), (2, 1));
        assert_eq!(reply.damaged[0].name, "two");
        let log = SnapshotRequest::Log {
            path: b"two".to_vec(),
            from: 0,
        };
        let reply = answer_snapshots(snapshots, &log).unwrap();
        assert_eq!((reply.changes.len(), reply.damaged_count), (1, 1));
        assert!(matches!(snapshots.create("two"), Err(Error::Exists)));
        assert!(matches!(snapshots.find("two"), Err(Error::Corrupt { .. })));

        snapshots.set_policy("daily=2".parse().unwrap()).unwrap();
        let mut changed = Vec::new();
        snapshots.follow_policy(&mut changed).unwrap();
        assert_eq!(changed.len(), 1);
        let daily = snapshots.list().unwrap().pop().unwrap();
        assert_eq!(daily.made_by, crate::MadeBy::Policy(Period::Daily));

        assert!(findings(&volume).iter().any(|found| found.contains("two")));
        assert_eq!(ids(&volume), [0, 1, 2, 3]);
        snapshots.remove("two").unwrap();
        assert_eq!(ids(&volume), [0, 2, 3]);
        assert_eq!(findings(&volume), [""; 0]);
        assert!(matches!(snapshots.remove("two"), Err(Error::NotFound)));
        volume.close().unwrap();
    }

    #[test]
    fn each_damaged_record_takes_the_keys_that_are_known_to_be_its_own() {
        let of_two = [&1u64.to_le_bytes()[..], b"x"].concat();
        let volume = volume(|batch| {
            batch.put(keys::snapshot_record("one"), "x");
            batch.put(keys::snapshot_record("two"), of_two);
            batch.put(keys::snapshot_record("three"), "x");
        });
        let snapshots = volume.snapshots();
        snapshots.remove("one").unwrap();
        assert_eq!(ids(&volume), [0, 1, 2], "it may be any of two");
        snapshots.remove("two").unwrap();
        assert_eq!(ids(&volume), [0, 2]);
        snapshots.create("whole").unwrap();
        snapshots.remove("three").unwrap();
        assert_eq!(ids(&volume), [3]);
        assert_eq!(findings(&volume), [""; 0]);
        volume.close().unwrap();
    }

    #[test]
    fn names_that_no_snapshot_can_have_are_told_as_text() {
        let odd: [&[u8]; 5] = [b"", b"..", b"a/b", b"\xff ", b"x\ny"];
        let prefix = keys::snapshot_records();
        let volume = volume(|batch| {
            for (name, id) in odd.iter().zip(3..) {
                let record = SnapshotRecord {
                    id,
                    seq: 1,
                    time: crate::Time::default(),
                    made_by: crate::MadeBy::User,
                };
                batch.put([&prefix, *name].concat(), record.encode());
            }
        });
        let told = ["\\x", "\\x2e\\x2e", "a\\x2fb", "x\\x0ay", "\\xff\\x20"];
        assert_eq!(names(&volume).1, told);
        for name in told {
            check_snapshot_name(name).unwrap();
            volume.snapshots().remove(name).unwrap();
        }
        let (whole, damaged) = names(&volume);
        assert_eq!(whole, ["one", "two", "three"]);
        assert_eq!(damaged, [""; 0]);
        assert_eq!(ids(&volume), [0, 1, 2]);
        volume.close().unwrap();
    }

    #[test]
    fn ids_of_keys_without_a_record_are_not_given_again() {
        let volume = volume(|batch| {
            batch.put(keys::snapshot_record("three"), "x");
            batch.put(keys::snapshot_counts(), "x");
        });
        let snapshots = volume.snapshots();
        assert_eq!(snapshots.count().unwrap(), 3);
        assert_eq!(snapshots.create("four").unwrap().id, 3);
        assert_eq!(snapshots.count().unwrap(), 4);
        snapshots.remove("three").unwrap();
        assert_eq!(findings(&volume), [""; 0]);
        volume.close().unwrap();
    }

    #[test]
    fn mounted_snapshot_whose_record_is_damaged_stays() {
        let volume = volume(|_| ());
        let view = crate::view(&volume, "two").unwrap();
        let mut batch = Batch::new();
        batch.put(keys::snapshot_record("two"), "x");
        volume.tree().apply(batch).unwrap();
        let removed = volume.snapshots().remove("two");
        assert!(matches!(removed, Err(Error::Busy)), "{removed:?}");
        drop(view);
        volume.snapshots().remove("two").unwrap();
        assert_eq!(ids(&volume), [0, 2]);
        volume.close().unwrap();
    }
}
