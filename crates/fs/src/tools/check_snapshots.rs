//! The check of snapshots of the volume: of their records (F16), and of the file system in each.
//!
//! Each snapshot is checked by itself, in its window, at the cost of all its names and blocks.

use std::collections::BTreeMap;

use ramet_betree::{Tree, successor_of_prefix, window};

use crate::error::Result;
use crate::format::keys;
use crate::format::snapshot::{SnapshotCounts, SnapshotRecord, check_snapshot_name};
use crate::ops::snapshot_records::ids_in;
use crate::tools::check::{Finding, Findings, check};

/// Checks the live file system, all snapshots and their records.
///
/// # Errors
/// `CheckTooLarge`, and those of the tree. A violated invariant is a finding, not an error.
pub(crate) fn check_all(tree: &Tree, memory_bytes: u64) -> Result<Vec<Finding>> {
    let mut findings = check(tree, memory_bytes)?;
    let (snapshots, of_records) = check_records(tree)?;
    findings.extend(of_records);
    for (id, name) in snapshots {
        let of_snapshot = check(&window(tree, keys::snapshot_base(id)), memory_bytes)?;
        findings.extend(of_snapshot.into_iter().map(|found| Finding {
            detail: format!("in snapshot {name:?}: {}", found.detail),
            ..found
        }));
    }
    Ok(findings)
}

/// The names of snapshots by their ids, and the violations of F16.
fn check_records(tree: &Tree) -> Result<(BTreeMap<u64, String>, Vec<Finding>)> {
    let snapshot = tree.snapshot();
    let mut findings = Findings::default();
    let mut wrong = |detail: String| findings.add("F16", detail);
    let counts = snapshot.get(&keys::snapshot_counts())?;
    let counts = SnapshotCounts::decode(counts.as_ref()).unwrap_or_else(|error| {
        wrong(error.to_string());
        SnapshotCounts::default()
    });
    let (prefix, mut found) = (keys::snapshot_records(), BTreeMap::new());
    let (end, mut count) = (successor_of_prefix(&prefix), 0);
    for item in snapshot.scan(&prefix, end.as_deref()) {
        let (key, value) = item?;
        count += 1;
        let name = String::from_utf8_lossy(&key[prefix.len()..]).into_owned();
        if name.as_bytes() != &key[prefix.len()..] || check_snapshot_name(&name).is_err() {
            wrong(format!("name {name:?}"));
        }
        match SnapshotRecord::decode(&value) {
            Ok(record) if record.id >= counts.next_id => {
                wrong(format!("{name:?} has id {}, which none had yet", record.id));
            }
            Ok(record) => {
                if let Some(other) = found.insert(record.id, name.clone()) {
                    wrong(format!("{name:?} and {other:?} have one id"));
                }
            }
            Err(error) => wrong(format!("{name:?}: {error}")),
        }
    }
    if count != counts.count {
        wrong(format!("{count} snapshots, not {}", counts.count));
    }
    for index in keys::INDEXES {
        let (ids, other) = ids_in(&snapshot, index)?;
        for id in ids.iter().filter(|id| !found.contains_key(id)) {
            wrong(format!(
                "keys of a snapshot {id}, which has no whole record"
            ));
        }
        if let Some(key) = other {
            wrong(format!("key {key:?}"));
        }
    }
    Ok((found, findings.into_all()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_betree::Batch;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::{FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO, Volume};

    /// The invariants that are violated on a volume with two snapshots after `forge`.
    fn invariants(forge: impl FnOnce(&mut Batch)) -> Vec<&'static str> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let new = NewInode::new(Kind::Regular, 0o644);
        volume.names().create(ROOT_INO, b"f", &new).unwrap();
        volume.snapshots().create("one").unwrap();
        volume.snapshots().create("two").unwrap();
        let mut batch = Batch::new();
        forge(&mut batch);
        if !batch.is_empty() {
            volume.tree().apply(batch).unwrap();
        }
        let findings = check_all(volume.tree(), u64::MAX).unwrap();
        findings.iter().map(|found| found.invariant).collect()
    }

    /// A change that violates F16.
    type Forge<'a> = &'a dyn Fn(&mut Batch);

    #[test]
    fn f16_records_that_do_not_tell_the_snapshots_are_found() {
        assert_eq!(invariants(|_| ()), [""; 0]);
        let record = |id| {
            let record = SnapshotRecord {
                id,
                seq: 1,
                time: crate::Time::default(),
                made_by: crate::MadeBy::User,
            };
            record.encode()
        };
        let counts = |next_id, count| SnapshotCounts { next_id, count }.encode();
        let forged: [(&str, Forge<'_>); 7] = [
            ("no record", &|batch| {
                batch.delete(keys::snapshot_record("one"));
                batch.put(keys::snapshot_counts(), counts(2, 1));
            }),
            ("count", &|batch| {
                batch.put(keys::snapshot_counts(), counts(2, 3))
            }),
            ("next id", &|batch| {
                batch.put(keys::snapshot_record("three"), record(2));
            }),
            ("one id", &|batch| {
                batch.put(keys::snapshot_record("three"), record(1));
            }),
            ("bytes", &|batch| {
                batch.put(keys::snapshot_record("one"), "x")
            }),
            ("counts", &|batch| batch.put(keys::snapshot_counts(), "x")),
            ("key", &|batch| batch.put(&b"\x02\x01x"[..], "")),
        ];
        for (what, forge) in forged {
            let found = invariants(forge);
            assert!(!found.is_empty(), "{what}");
            assert!(found.iter().all(|one| *one == "F16"), "{what}: {found:?}");
        }
    }

    #[test]
    fn a_fault_in_one_snapshot_alone_is_found() {
        let found = invariants(|batch| {
            let key = keys::entry(b"", b"f");
            let inside = [&key[..1], &keys::snapshot_base(1), &key[1..]].concat();
            batch.put(inside, "x");
        });
        assert!(found.contains(&"F1"), "{found:?}");
    }
}
