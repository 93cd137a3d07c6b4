//! The check of forks: of their records and bases (F18), and of the files in each base.
//!
//! Each base is checked by itself, in its window, at the cost of all its names and blocks. The top
//! of a fork may be gone until its record is collected, so the check does not look for it.

use std::collections::BTreeSet;

use ramet_betree::{Snapshot, Tree, successor_of_prefix, window};

use crate::error::{Error, Result};
use crate::format::fork::ForkRecord;
use crate::format::keys;
use crate::namespace::numbers::Counters;
use crate::tools::check::{Finding, Findings, check_base};

/// Checks all forks.
///
/// # Errors
/// `CheckTooLarge`, and those of the tree. A violated invariant is a finding, not an error.
pub(crate) fn check_forks(tree: &Tree, memory_bytes: u64) -> Result<Vec<Finding>> {
    let counters = Counters::read(tree)?;
    let snapshot = tree.snapshot();
    let mut findings = Findings::default();
    let found = check_records(&snapshot, counters, &mut findings)?;
    check_keys(&snapshot, &found, &mut findings)?;
    let mut findings = findings.into_all();
    for id in found {
        let base = window(tree, keys::fork_base(id));
        let of_base = match check_base(&base, counters, memory_bytes) {
            Err(Error::Corrupt { what, detail }) => vec![Finding {
                invariant: "F18",
                detail: format!("{what}: {detail}"),
            }],
            of_base => of_base?,
        };
        findings.extend(of_base.into_iter().map(|found| Finding {
            detail: format!("in base {id} of a fork: {}", found.detail),
            ..found
        }));
    }
    Ok(findings)
}

/// The ids of all bases that records tell of.
fn check_records(
    snapshot: &Snapshot,
    counters: Counters,
    findings: &mut Findings,
) -> Result<BTreeSet<u64>> {
    let mut wrong = |detail: String| findings.add("F18", detail);
    let (prefix, mut found) = (keys::fork_records(), BTreeSet::new());
    for item in snapshot.scan(&prefix, successor_of_prefix(&prefix).as_deref()) {
        let (key, value) = item?;
        if keys::top_of_fork(&key).is_none() {
            wrong(format!("key {key:?}"));
        }
        match ForkRecord::decode(&value) {
            Ok(record) => {
                let last = record.id.max(record.base.unwrap_or(0));
                if last >= counters.generation {
                    wrong(format!("id {last}, which none had yet"));
                }
                if let Some(base) = record.base.filter(|base| !found.insert(*base)) {
                    wrong(format!("two forks with base {base}"));
                }
            }
            Err(error) => wrong(format!("{key:?}: {error}")),
        }
    }
    Ok(found)
}

/// Finds keys of bases that no record tells of.
fn check_keys(snapshot: &Snapshot, found: &BTreeSet<u64>, findings: &mut Findings) -> Result<()> {
    for index in keys::INDEXES {
        let mut rest = keys::fork_bases(index);
        let end = successor_of_prefix(&rest);
        // One lookup for each base: the keys of the next one begin behind those of this one.
        loop {
            let mut scan = snapshot.scan(&rest, end.as_deref());
            let Some((key, _)) = scan.next().transpose()? else {
                break;
            };
            let Some((id, _)) = keys::in_fork_base(&key) else {
                findings.add("F18", format!("key {key:?}"));
                break;
            };
            if !found.contains(&id) {
                findings.add("F18", format!("keys of a base {id}, which no fork has"));
            }
            let all = [&[index], &keys::fork_base(id)[..]].concat();
            rest = successor_of_prefix(&all).expect("an index is small");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_betree::Batch;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::{Identity, Ino};
    use crate::{Caller, FormatOptions, Kind, NewFork, NewInode, OpenOptions, ROOT_INO, Volume};

    /// A violation, given the key and the record of the fork with a base.
    type Forge<'a> = &'a dyn Fn(&mut Batch, &[u8], &ForkRecord);

    /// The invariants that are violated on a volume with a fork with a base, and one without, after
    /// `forge`.
    fn invariants(forge: Forge<'_>) -> Vec<&'static str> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let new = NewInode::new(Kind::Directory, 0o755);
        let dir = volume.names().create(ROOT_INO, b"d", &new).unwrap().ino;
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = volume.names().create(dir, b"f", &new).unwrap().ino;
        volume.files().write(file, 0, b"content", None).unwrap();
        for (name, has_base) in [(b"one", true), (b"two", false)] {
            let new = NewFork { note: "", has_base };
            let (caller, to) = (Caller::root(), (ROOT_INO, &name[..]));
            volume.trees().fork(&caller, dir, to, new).unwrap();
        }
        let prefix = keys::fork_records();
        let end = successor_of_prefix(&prefix);
        let mut batch = Batch::new();
        for item in volume.tree().scan(&prefix, end.as_deref()) {
            let (key, value) = item.unwrap();
            let record = ForkRecord::decode(&value).unwrap();
            if record.base.is_some() {
                forge(&mut batch, &key, &record);
            }
        }
        if !batch.is_empty() {
            volume.tree().apply(batch).unwrap();
        }
        let findings = volume.controls().check().unwrap();
        findings.iter().map(|found| found.invariant).collect()
    }

    #[test]
    fn f18_records_and_bases_that_do_not_match_are_found() {
        assert_eq!(invariants(&|_, _, _| ()), [""; 0]);
        let other = |ino| {
            keys::fork_record(Identity {
                ino: Ino(ino),
                generation: 9,
            })
        };
        let forged: [(&str, Forge<'_>); 8] = [
            ("no record", &|batch, key, _| {
                batch.delete(key.to_vec());
            }),
            ("no base", &|batch, _, fork| {
                for index in keys::INDEXES {
                    batch.delete_prefix(keys::range(index, &keys::fork_base(fork.id)));
                }
            }),
            ("says that it has none", &|batch, key, fork| {
                let fork = ForkRecord {
                    base: None,
                    ..fork.clone()
                };
                batch.put(key.to_vec(), fork.encode());
            }),
            ("id", &|batch, _, fork| {
                let fork = ForkRecord {
                    id: 1 << 50,
                    base: None,
                    ..fork.clone()
                };
                batch.put(other(9), fork.encode());
            }),
            ("one base", &|batch, _, fork| {
                batch.put(other(9), fork.encode());
            }),
            ("bytes", &|batch, _, _| batch.put(other(9), "x")),
            ("key of a record", &|batch, key, fork| {
                batch.delete(key.to_vec());
                batch.put([key, b"x"].concat(), fork.encode());
            }),
            ("key", &|batch, _, _| batch.put(&b"\x02\x03x"[..], "")),
        ];
        for (what, forge) in forged {
            let found = invariants(forge);
            assert!(!found.is_empty(), "{what}");
            assert!(found.iter().all(|one| *one == "F18"), "{what}: {found:?}");
        }
    }

    #[test]
    fn a_fault_in_a_base_alone_is_found() {
        let found = invariants(&|batch, _, fork| {
            let base = keys::fork_base(fork.id);
            batch.put(keys::entry(&base, b"f"), "x");
        });
        assert!(found.contains(&"F1"), "{found:?}");
        let found = invariants(&|batch, _, fork| {
            let file = keys::child(&keys::fork_base(fork.id), b"f");
            batch.delete(keys::block(&keys::blocks(&file), 0));
        });
        assert_eq!(found, ["F7"]);
    }
}
