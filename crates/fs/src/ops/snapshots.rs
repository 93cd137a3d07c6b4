//! Snapshots of the volume: the whole of it as it was at one moment.
//!
//! A snapshot is a clone of the root's range into a key range of its own, which no name and no
//! clone of the root leads to, and a record with its name. One batch makes it, and one batch removes
//! it; the nodes that only it refers to are then reclaimed as those of any clone. Tables of inode
//! numbers and counters are in it, so a volume that is opened in its window
//! ([`crate::view`]) shows the names, contents and numbers of then. Orphans are not in it:
//! it is the state that a crash at its moment would leave.
//!
//! Nothing in memory grows with the number of snapshots, and an opening reads none of their records.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Batch, Seq, Span, Tree, exclusive_bytes, newest_seq};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::Time;
use crate::format::snapshot::{
    MadeBy, Period, Policy, SnapshotCounts, SnapshotRecord, check_snapshot_name,
};
use crate::namespace::numbers::{Numbers, takes_no_changes};
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Shown, Transaction, lock_states};
use crate::ops::snapshot_records::{Records, SnapshotEntry, removal_of};
use crate::ops::times::Times;

/// Snapshots of the volume.
pub struct Snapshots {
    pub(super) namespace: Arc<Namespace>,
    pub(super) numbers: Arc<Numbers>,
    pub(super) times: Arc<Times>,
    /// Held over each change of the set of snapshots.
    pub(super) registry: Mutex<()>,
    /// Views that are open, by the id of the snapshot.
    viewed: Arc<Mutex<HashMap<u64, Views>>>,
}

/// The open views of one snapshot.
#[derive(Default)]
struct Views {
    /// Views that keep the snapshot from being removed.
    holding: usize,
    /// Views that learn of the removal.
    passing: usize,
    /// Whether the snapshot was removed. It is set before the batch of the removal is applied.
    is_gone: Arc<AtomicBool>,
}

/// A view of a snapshot, which keeps that from being removed or learns of its removal.
pub(crate) struct Viewed {
    id: u64,
    holds: bool,
    is_gone: Arc<AtomicBool>,
    viewed: Arc<Mutex<HashMap<u64, Views>>>,
}

impl Viewed {
    /// Number of the snapshot, which no other one gets.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the snapshot was removed. An answer may be wrong if this is true after it was made,
    /// and is right otherwise: the removal says so before it changes anything.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst)
    }
}

impl Drop for Viewed {
    fn drop(&mut self) {
        let mut viewed = self.viewed.lock();
        if let Some(views) = viewed.get_mut(&self.id) {
            let count = if self.holds {
                &mut views.holding
            } else {
                &mut views.passing
            };
            *count -= 1;
            if views.holding + views.passing == 0 {
                viewed.remove(&self.id);
            }
        }
    }
}

impl Snapshots {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        numbers: &Arc<Numbers>,
        times: &Arc<Times>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            times: Arc::clone(times),
            registry: Mutex::new(()),
            viewed: Arc::default(),
        }
    }

    /// Makes a snapshot of the volume as it is now. Atomic, durable with the next sync, and one
    /// record of the journal for a volume of any size.
    ///
    /// # Errors
    /// `Exists`, `Invalid` and `NameTooLong` for the name, and those of the tree.
    pub fn create(&self, name: &str) -> Result<SnapshotEntry> {
        self.create_as(name, MadeBy::User)
    }

    pub(super) fn create_as(&self, name: &str, made_by: MadeBy) -> Result<SnapshotEntry> {
        check_snapshot_name(name)?;
        match self.numbers.store_all() {
            // Numbers that are in memory only are others in the snapshot.
            Err(error) if takes_no_changes(&error) => {}
            done => done?,
        }
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let _registry = self.registry.lock();
        self.create_held(name, made_by)
    }

    /// The same for a caller that holds the registry.
    pub(super) fn create_held(&self, name: &str, made_by: MadeBy) -> Result<SnapshotEntry> {
        let tree = &self.namespace.tree;
        if tree.get(&keys::snapshot_record(name))?.is_some() {
            return Err(Error::Exists);
        }
        let counts = self.counts()?;
        if counts.next_id >= keys::SNAPSHOT_IDS_MAX {
            return Err(Error::TooManyLinks);
        }
        let (record, shown) = self.namespace.until_applied(|round| {
            let record = SnapshotRecord {
                id: counts.next_id,
                seq: 0,
                time: self.times.now(),
                made_by,
            };
            self.create_now((name, record), counts, round)
        })?;
        shown.make_durable()?;
        Ok(SnapshotEntry::new(name, record))
    }

    /// Makes the snapshot, if it has not to wait.
    fn create_now(
        &self,
        (name, mut record): (&str, SnapshotRecord),
        counts: SnapshotCounts,
        round: Round,
    ) -> Result<(SnapshotRecord, Seq)> {
        let tree = &self.namespace.tree;
        let mut tx = Transaction::new(lock_states(&[]));
        // Notes come and go with the links held for writing.
        let _links = self.namespace.links.read();
        // Each change of a file is applied with the topology held for reading.
        let topology = self.namespace.topology.write();
        record.seq = newest_seq(tree);
        self.put_snapshot(&mut tx, (name, &record), counts)?;
        // Merged segments and flushed messages can wait for the background.
        let seq = tx.apply_or_defer(&topology, tree, round.as_it_is())?;
        Ok((record, seq))
    }

    /// Adds a snapshot of the state before the transaction, which has nothing else yet. The caller
    /// holds the links, and the topology for writing.
    pub(super) fn put_snapshot(
        &self,
        tx: &mut Transaction<'_>,
        (name, record): (&str, &SnapshotRecord),
        counts: SnapshotCounts,
    ) -> Result<()> {
        let tree = &self.namespace.tree;
        let indexes = self.namespace.unsettled.indexes();
        let base = keys::snapshot_base(record.id);
        let mut ranges = keys::ranges_of_snapshots().to_vec();
        ranges.retain(|(index, ..)| indexes.contains(index));
        for (index, lo, hi) in ranges {
            let prefix = [&[index], &base[..]].concat();
            if index == keys::DATA && failpoints::is_on(Fault::SnapshotTorn) {
                tree.apply(std::mem::take(&mut tx.batch))?;
            }
            tx.batch.clone_range(lo, Some(hi), 1, prefix);
        }
        tx.batch.put(keys::snapshot_record(name), record.encode());
        let counts = SnapshotCounts {
            next_id: record.id + u64::from(!failpoints::is_on(Fault::SnapshotIdGivenAgain)),
            count: counts.count + 1,
        };
        tx.batch.put(keys::snapshot_counts(), counts.encode());
        Ok(())
    }

    /// Makes a snapshot of the state before a rollback.
    ///
    /// # Errors
    /// Those of [`Snapshots::create`].
    pub(crate) fn create_before_rollback(&self) -> Result<SnapshotEntry> {
        let name = self.name_before(&self.counts()?)?;
        self.create_as(&name, MadeBy::Rollback)
    }

    /// A name for the snapshot of the state before that none has. No other
    /// thread makes snapshots until it is taken.
    pub(super) fn name_before(&self, counts: &SnapshotCounts) -> Result<String> {
        let name = format!("before-rollback-{}", utc(self.times.now()));
        let tree = &self.namespace.tree;
        // A second one within a second, or a user took the name.
        match tree.get(&keys::snapshot_record(&name))?.is_some() {
            true => Ok(format!("{name}-{}", counts.next_id)),
            false => Ok(name),
        }
    }

    /// Removes a snapshot, also one whose record is damaged. Atomic, durable with the next sync; the
    /// space that only the snapshot uses comes back in the background.
    ///
    /// # Errors
    /// `NotFound`, `Busy` while it is viewed, and those of the tree.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let _registry = self.registry.lock();
        self.remove_held(name)
    }

    /// The same for a caller that holds the registry.
    fn remove_held(&self, name: &str) -> Result<()> {
        let removal = removal_of(&self.namespace.tree, name)?.ok_or(Error::NotFound)?;
        let viewed = self.viewed.lock();
        let views: Vec<_> = removal.ids.iter().filter_map(|id| viewed.get(id)).collect();
        if views.iter().any(|views| views.holding > 0) {
            return Err(Error::Busy);
        }
        let counts = self.counts()?;
        let mut batch = Batch::new();
        for id in &removal.ids {
            let base = keys::snapshot_base(*id);
            for index in keys::INDEXES {
                if index != keys::DATA || !failpoints::is_on(Fault::SnapshotContentsKept) {
                    batch.delete_prefix([&[index], &base[..]].concat());
                }
            }
        }
        batch.delete(removal.key);
        let counts = SnapshotCounts {
            count: counts.count.saturating_sub(1),
            ..counts
        };
        batch.put(keys::snapshot_counts(), counts.encode());
        let tell = |is_gone| {
            for views in &views {
                views.is_gone.store(is_gone, Ordering::SeqCst);
            }
        };
        tell(true);
        // A view of the snapshot begins before the batch, and is told above, or finds no record.
        let tree = &self.namespace.tree;
        let seq = tree.apply_admitted(batch).inspect_err(|_| tell(false))?;
        Shown::new(tree, seq).make_durable()
    }

    /// Keeps the snapshot from being removed as long as the result lives. Returns the bytes that
    /// its keys have behind the index, too.
    ///
    /// # Errors
    /// `NotFound`, and those of the tree.
    pub(crate) fn view(&self, name: &str) -> Result<(Viewed, Bytes)> {
        self.view_as(name, true)
    }

    /// The same for a view that keeps the snapshot from being removed (`holds`), or learns of its
    /// removal.
    pub(crate) fn view_as(&self, name: &str, holds: bool) -> Result<(Viewed, Bytes)> {
        let mut viewed = self.viewed.lock();
        let record = self.stored(name)?.ok_or(Error::NotFound)?;
        let views = viewed.entry(record.id).or_default();
        if holds {
            views.holding += 1;
        } else {
            views.passing += 1;
        }
        let view = Viewed {
            id: record.id,
            holds,
            is_gone: Arc::clone(&views.is_gone),
            viewed: Arc::clone(&self.viewed),
        };
        Ok((view, keys::snapshot_base(record.id)))
    }

    /// The tree that has all snapshots.
    pub(crate) fn tree(&self) -> &Tree {
        &self.namespace.tree
    }

    /// The snapshot with this name.
    ///
    /// # Errors
    /// `NotFound`, and those of the tree.
    pub fn find(&self, name: &str) -> Result<SnapshotEntry> {
        let record = self.stored(name)?.ok_or(Error::NotFound)?;
        Ok(SnapshotEntry::new(name, record))
    }

    /// All snapshots but those whose records are damaged, in the order in which they were made.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn list(&self) -> Result<Vec<SnapshotEntry>> {
        Ok(self.records()?.whole)
    }

    /// All snapshots.
    pub(crate) fn records(&self) -> Result<Records> {
        Records::read(&self.namespace.tree)
    }

    /// The number of snapshots.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub fn count(&self) -> Result<u64> {
        Ok(self.counts()?.count)
    }

    /// An estimate of the bytes of names, attributes and contents in all snapshots, each counted in
    /// full.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        let ranges = keys::INDEXES.map(|index| Span::prefix(keys::snapshots(index)));
        let bytes = ranges
            .iter()
            .map(|span| self.namespace.tree.live_bytes(span));
        bytes.sum()
    }

    /// The bytes that only this snapshot uses, of each of these: they come back when it is removed
    /// and the others are not. All are of one checkpoint, which is written first if it `is_fresh`.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn exclusive_bytes(&self, ids: &[u64], is_fresh: bool) -> Result<Vec<u64>> {
        let ranges = |id: &u64| {
            let base = keys::snapshot_base(*id);
            let of = |index| Span::prefix([&[index], &base[..]].concat());
            keys::INDEXES.map(of).to_vec()
        };
        let lists: Vec<_> = ids.iter().map(ranges).collect();
        Ok(exclusive_bytes(&self.namespace.tree, &lists, is_fresh)?)
    }

    /// The policy by which [`Snapshots::follow_policy`] makes snapshots.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub fn policy(&self) -> Result<Policy> {
        let Some(stored) = self.namespace.tree.get(&keys::snapshot_policy())? else {
            return Ok(Policy::default());
        };
        let text = std::str::from_utf8(&stored).unwrap_or_default();
        text.parse().map_err(|_| Error::Corrupt {
            what: "policy of snapshots",
            detail: format!("{stored:?}"),
        })
    }

    /// Stores the policy.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn set_policy(&self, policy: Policy) -> Result<()> {
        let mut batch = Batch::new();
        // A full volume may get a policy that keeps fewer.
        batch.count_as_removal();
        match policy.is_empty() {
            true => batch.delete(keys::snapshot_policy()),
            false => batch.put(keys::snapshot_policy(), policy.to_string().into_bytes()),
        }
        self.namespace.tree.admit(RECORDS_BYTES)?;
        self.namespace.tree.apply(batch)?;
        Ok(())
    }

    /// Whether [`Snapshots::follow_policy`] would make a snapshot now.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn is_due(&self) -> Result<bool> {
        let policy = self.policy()?;
        if policy.is_empty() {
            return Ok(false);
        }
        let (all, now) = (self.list()?, self.times.now());
        let mut wanted = Period::ALL.into_iter().filter(|p| policy.keep(*p) > 0);
        Ok(wanted.any(|period| is_due(period, &all, now)))
    }

    /// The snapshots of the policy that lie ahead of the clock by more than an hour, in the order in
    /// which they were made: the clock is behind now, or was ahead when they were made. An empty
    /// policy has none.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn ahead_of_clock(&self) -> Result<Vec<SnapshotEntry>> {
        if self.policy()?.is_empty() {
            return Ok(Vec::new());
        }
        let (mut all, now) = (self.list()?, self.times.now());
        all.retain(|entry| entry.is_ahead_of(now));
        Ok(all)
    }

    /// Makes the snapshots that the policy wants by now, and removes those of its own that it keeps
    /// no longer, in the order in which they were made. To be called every minute or so. A period in
    /// which the volume is not mounted gets none, nor does one that is not later than that of the
    /// newest snapshot of its kind. One that lies ahead of the clock does not count there
    /// ([`Snapshots::ahead_of_clock`]): a clock that was wrong once stops nothing. Adds the names of
    /// the snapshots that were made and removed to `changed`.
    ///
    /// # Errors
    /// The first of those of [`Snapshots::create`] and [`Snapshots::remove`]. The other periods are
    /// followed all the same.
    pub fn follow_policy(&self, changed: &mut Vec<String>) -> Result<()> {
        let policy = self.policy()?;
        if policy.is_empty() {
            return Ok(());
        }
        let mut outcome = Ok(());
        for period in Period::ALL {
            let followed = self.follow(period, policy.keep(period) as usize, changed);
            outcome = outcome.and(followed);
        }
        outcome
    }

    fn follow(&self, period: Period, keep: usize, changed: &mut Vec<String>) -> Result<()> {
        let made_by = MadeBy::Policy(period);
        let mut own = self.list()?;
        own.retain(|entry| entry.made_by == made_by);
        let now = self.times.now();
        let mut outcome = Ok(());
        if keep > 0 && is_due(period, &own, now) {
            let name = format!("{}-{}", period.word(), utc(now));
            let mut made = self.create_as(&name, made_by);
            // On a full volume the oldest one makes room for the new one.
            let is_full = made.as_ref().is_err_and(takes_no_changes);
            // No more go than the new one replaces.
            let replaced = (own.len() + 1).saturating_sub(keep);
            let may_go = |entry: &SnapshotEntry| !self.is_mounted(entry);
            if is_full && own[..replaced].iter().any(may_go) {
                outcome = self.prune_oldest(&mut own, changed);
                made = self.create_as(&name, made_by);
            }
            match made {
                Ok(entry) => {
                    own.push(entry);
                    changed.push(name);
                }
                // A user took the name.
                Err(Error::Exists) => {}
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        let too_many = own.len().saturating_sub(keep);
        for entry in own.drain(..too_many) {
            outcome = outcome.and(self.prune(&entry, changed).map(drop));
        }
        outcome
    }

    /// Removes the oldest snapshot that is not mounted, also from the list.
    fn prune_oldest(&self, own: &mut Vec<SnapshotEntry>, changed: &mut Vec<String>) -> Result<()> {
        for at in 0..own.len() {
            if self.prune(&own[at], changed)? {
                own.remove(at);
                break;
            }
        }
        Ok(())
    }

    fn is_mounted(&self, entry: &SnapshotEntry) -> bool {
        let viewed = self.viewed.lock();
        viewed.get(&entry.id).is_some_and(|views| views.holding > 0)
    }

    /// Removes a snapshot of the policy, unless it is mounted. Answers whether it is gone: a user may
    /// have removed it, and made another one with its name.
    fn prune(&self, entry: &SnapshotEntry, changed: &mut Vec<String>) -> Result<bool> {
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let _registry = self.registry.lock();
        let stored = self.stored(&entry.name)?;
        if stored.is_none_or(|record| record.id != entry.id) {
            return Ok(true);
        }
        match self.remove_held(&entry.name) {
            Err(Error::Busy) => Ok(false),
            done => {
                done?;
                changed.push(entry.name.clone());
                Ok(true)
            }
        }
    }

    pub(super) fn stored(&self, name: &str) -> Result<Option<SnapshotRecord>> {
        let value = self.namespace.tree.get(&keys::snapshot_record(name))?;
        value
            .map(|value| SnapshotRecord::decode(&value))
            .transpose()
    }

    /// The counts. Where they are damaged they are counted anew.
    pub(super) fn counts(&self) -> Result<SnapshotCounts> {
        let stored = self.namespace.tree.get(&keys::snapshot_counts())?;
        match SnapshotCounts::decode(stored.as_ref()) {
            Err(Error::Corrupt { .. }) => {
                let records = self.records()?;
                Ok(SnapshotCounts {
                    next_id: records.next_id(&self.namespace.tree)?,
                    count: records.count(),
                })
            }
            counts => counts,
        }
    }
}

/// Whether the period of `now` is later than those of all snapshots that the policy made for it and
/// that do not lie ahead of the clock.
fn is_due(period: Period, all: &[SnapshotEntry], now: Time) -> bool {
    let own = all
        .iter()
        .filter(|entry| entry.made_by == MadeBy::Policy(period) && !entry.is_ahead_of(now));
    let newest = own.map(|entry| period.number_at(entry.time)).max();
    newest.is_none_or(|newest| newest < period.number_at(now))
}

/// A time in UTC, to the second: `20261125T220000Z`.
pub(crate) fn utc(time: Time) -> String {
    const DAY: i64 = 24 * 60 * 60;
    let (days, secs) = (time.secs.div_euclid(DAY), time.secs.rem_euclid(DAY));
    // Days are counted from 0000-03-01, so that a leap day ends its year.
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::{FormatOptions, OpenOptions, Volume, view};

    #[test]
    fn times_are_told_in_utc() {
        let told = |secs| utc(Time { secs, nanos: 0 });
        assert_eq!(told(0), "19700101T000000Z");
        assert_eq!(told(951_782_400), "20000229T000000Z");
        assert_eq!(told(1_795_644_000), "20261125T220000Z");
        assert_eq!(told(-1), "19691231T235959Z");
    }
    #[test]
    fn the_oldest_snapshot_that_is_not_mounted_makes_room() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 26));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let snapshots = volume.snapshots();
        for name in ["first", "second", "third"] {
            snapshots
                .create_as(name, MadeBy::Policy(Period::Daily))
                .unwrap();
        }
        let (mounted, mut own, mut changed) = (
            view(&volume, "first").unwrap(),
            snapshots.list().unwrap(),
            Vec::new(),
        );
        snapshots.prune_oldest(&mut own, &mut changed).unwrap();
        assert_eq!(changed, ["second"]);
        let left: Vec<_> = own.iter().map(|entry| &*entry.name).collect();
        assert_eq!(left, ["first", "third"]);
        drop(mounted);
        snapshots.prune_oldest(&mut own, &mut changed).unwrap();
        assert_eq!(changed, ["second", "first"]);
        assert_eq!(snapshots.list().unwrap().len(), 1);
        volume.close().unwrap();
    }

    #[test]
    fn the_policy_leaves_a_snapshot_that_a_user_made_with_the_name_of_its_own() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 26));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let snapshots = volume.snapshots();
        let made_by = MadeBy::Policy(Period::Daily);
        let mut own = vec![snapshots.create_as("first", made_by).unwrap()];
        snapshots.remove("first").unwrap();
        let of_user = snapshots.create("first").unwrap();
        let mut changed = Vec::new();
        snapshots.prune_oldest(&mut own, &mut changed).unwrap();
        assert_eq!(changed, [""; 0]);
        assert_eq!(snapshots.find("first").unwrap().id, of_user.id);
        volume.close().unwrap();
    }
}
