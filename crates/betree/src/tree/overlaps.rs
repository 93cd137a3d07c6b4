//! Nodes that were found in places that overlap, of which one alone can be right.
//!
//! A trailer stays in free space until its block is written again. When the record and the trailer
//! of a node are lost, an older trailer of the same number may be found, whose extent lies partly
//! under a node that lives. These rules tell the wrong one of the two:
//!
//! - the root is right, since its bytes were read;
//! - an extent that the journal names is right, since its leaf came after the checkpoint;
//! - a node with a record of the old table is right;
//! - a node that is whole is right against one that is not;
//! - the node of the newer opening is right.
//!
//! A guest and its carrier have one extent, and do not contradict each other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use ramet_block::{Device, Extent};
use ramet_nodetable::NodeId;

use crate::tree::found_nodes::{FoundNodes, is_whole};

/// Bytes that a kept node occupies.
struct Taken {
    end: u64,
    /// Whether a node owns them, beside a guest.
    is_owned: bool,
}

/// The nodes at `live`, positions in `found`, that lie in the place of others. `journal` names
/// leaves and their extents.
pub(crate) fn displaced(
    dev: &dyn Device,
    found: &FoundNodes,
    live: &[usize],
    journal: &[(NodeId, Extent)],
    root: Option<NodeId>,
) -> HashSet<NodeId> {
    let extent = |at: usize| found.node(at).place.extent;
    let mut lost = HashSet::new();
    let mut by_addr = Vec::with_capacity(live.len());
    let named: HashSet<(NodeId, Extent)> = journal.iter().copied().collect();
    let in_journal = united(journal.iter().map(|(_, extent)| *extent).collect());
    for at in live.iter().copied() {
        let node = found.node(at);
        let next = in_journal.partition_point(|extent| extent.end() <= node.place.extent.addr);
        let is_under = in_journal
            .get(next)
            .is_some_and(|extent| extent.overlaps(&node.place.extent));
        if is_under && Some(node.id) != root && !named.contains(&(node.id, node.place.extent)) {
            lost.insert(node.id);
        } else {
            by_addr.push(at);
        }
    }
    by_addr.sort_unstable_by_key(|at| extent(*at));
    let mut rest = &by_addr[..];
    while let Some(first) = rest.first() {
        let (mut end, mut count) = (extent(*first).end(), 1);
        while rest.get(count).is_some_and(|at| extent(*at).addr < end) {
            end = end.max(extent(rest[count]).end());
            count += 1;
        }
        let (group, others) = rest.split_at(count);
        rest = others;
        if !is_one_place(found, group) {
            lost.extend(wrong_of(dev, found, group, root));
        }
    }
    lost
}

/// Whether nodes have one extent, which one of them owns at most.
fn is_one_place(found: &FoundNodes, group: &[usize]) -> bool {
    let place = |at: &usize| found.node(*at).place;
    let first = place(&group[0]).extent;
    let owners = group.iter().filter(|at| !place(at).is_guest());
    group.iter().all(|at| place(at).extent == first) && owners.count() <= 1
}

/// The nodes of a group that overlap better ones.
fn wrong_of(
    dev: &dyn Device,
    found: &FoundNodes,
    group: &[usize],
    root: Option<NodeId>,
) -> Vec<NodeId> {
    let mut best_first = group.to_vec();
    best_first.sort_by_cached_key(|at| {
        let node = found.node(*at);
        let is_root = Some(node.id) == root;
        let is_told = found.is_of_a_record(*at);
        // Nothing is written over a node that lives: of two, the later one is the right one.
        Reverse((is_root, is_told, node.opening, is_whole(dev, node)))
    });
    let mut wrong = Vec::new();
    // The kept ones are disjoint.
    let mut kept: BTreeMap<u64, Taken> = BTreeMap::new();
    for at in best_first {
        let node = found.node(at);
        let (extent, owns) = (node.place.extent, !node.place.is_guest());
        let last = kept.range_mut(..extent.end()).next_back();
        match last.filter(|(_, taken)| taken.end > extent.addr) {
            None => {
                let taken = Taken {
                    end: extent.end(),
                    is_owned: owns,
                };
                kept.insert(extent.addr, taken);
            }
            Some((addr, taken))
                if (*addr, taken.end) == (extent.addr, extent.end())
                    && !(owns && taken.is_owned) =>
            {
                taken.is_owned |= owns;
            }
            Some(_) => wrong.push(node.id),
        }
    }
    wrong
}

/// The same bytes as disjoint extents, by address.
fn united(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.sort_unstable();
    let mut united: Vec<Extent> = Vec::new();
    for extent in extents {
        match united.last_mut() {
            Some(last) if extent.addr <= last.end() => {
                last.len = last.end().max(extent.end()) - last.addr;
            }
            _ => united.push(extent),
        }
    }
    united
}

/// The parts of `usable` outside of `live`, extents inside of it.
pub(crate) fn holes(usable: Extent, live: Vec<Extent>) -> Vec<Extent> {
    let (mut holes, mut from) = (Vec::new(), usable.addr);
    for extent in united(live) {
        if extent.addr > from {
            holes.push(Extent::new(from, extent.addr - from));
        }
        from = extent.end();
    }
    if from < usable.end() {
        holes.push(Extent::new(from, usable.end() - from));
    }
    holes
}
