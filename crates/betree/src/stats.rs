//! What a tree tells about itself.

use std::ops::AddAssign;
use std::sync::atomic::Ordering;

use crate::key::range::KeyRange;
use crate::node::skeleton::Skeleton;
use crate::tree::inner::Inner;

/// Counters of an open tree. Sizes in bytes, times in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Size of the volume.
    pub device_bytes: u64,
    /// Bytes of keys and values that can be read, each clone counted in full; an estimate from the root's
    /// edges, without what is in memory.
    pub logical_bytes: u64,
    /// Space in use, with what only a checkpoint will free.
    pub allocated_bytes: u64,
    /// Space left.
    pub free_bytes: u64,
    /// Part of the free space that no new data gets: it is kept back for checkpoints and deletions, or what was accepted
    /// is still going to take it.
    pub reserved_bytes: u64,
    /// Freed space that the next checkpoint makes usable.
    pub pending_free_bytes: u64,
    /// What the host of a sparse device still gives, as far as is known; `None` for other devices.
    pub host_free_bytes: Option<u64>,
    /// Room of the host that a sparse device takes; `None` for other devices, or if it cannot be told.
    pub host_allocated_bytes: Option<u64>,
    /// Nodes in the node table.
    pub nodes: u64,
    /// Segments among them.
    pub segments: u64,
    /// Leaves among them.
    pub leaves: u64,
    /// Nodes without references that wait to be reclaimed.
    pub zombies: u64,
    /// Height label of the root.
    pub height: u64,
    /// Memory of messages, and of the nodes made of them, that are not written yet.
    pub pending_message_bytes: u64,
    /// Range messages in the memory buffer.
    pub buffered_ranges: u64,
    /// Time since the last checkpoint.
    pub checkpoint_age_ns: u64,
    /// Journal that a recovery would read now.
    pub journal_bytes: u64,
    /// Number of the last batch applied.
    pub seq: u64,
    /// Parts of nodes found in the cache.
    pub cache_hits: u64,
    /// Parts of nodes not found in the cache.
    pub cache_misses: u64,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Reads of nodes from the device.
    pub node_reads: u64,
    /// Nodes and segments that lookups and clones went through, in the cache or not.
    pub node_visits: u64,
    /// Bytes of nodes read.
    pub bytes_read: u64,
    /// Lookups in leaves and segments that a filter answered, without a read.
    pub filter_denials: u64,
    /// Leaves that scans asked for before they came to them.
    pub leaves_ahead: u64,
    /// Bytes of nodes written.
    pub bytes_written: u64,
    /// All that was written, by cause.
    pub written: WrittenBytes,
    /// How often each structural path was taken since the volume was opened.
    pub paths: PathCounts,
    /// Why the volume takes no writes any more, if so.
    pub poisoned: Option<String>,
}

/// Bytes handed to the device since the volume was opened, without the few of the node table and superblocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    /// Frames of the journal.
    pub journal: u64,
    /// Leaves written anew with what waited for them.
    pub leaves: u64,
    /// Leaves that were grafted.
    pub grafts: u64,
    /// Messages that rest in interior nodes over a checkpoint.
    pub segments: u64,
    /// Of these, copied from segments that were written before, to merge them or to free what is dead in them.
    pub copied: u64,
    /// Interior nodes without their messages.
    pub skeletons: u64,
}

/// How often each structural path was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// Interior nodes cut in two or more.
    pub splits: u64,
    /// Messages moved from a node to a child.
    pub flushes: u64,
    /// Leaf ranges written anew.
    pub rewrites: u64,
    /// Runs of small leaves joined.
    pub coalesces: u64,
    /// Interior nodes that were no more than their only edge.
    pub collapses: u64,
    /// Nodes that had become too high rebuilt as balanced trees over the same nodes further down.
    pub flattens: u64,
    /// Segments of a node merged.
    pub segment_merges: u64,
    /// GOTOs pushed into a child.
    pub goto_sinks: u64,
    /// GOTOs that overlap an edge in part and wait to be pushed into its child.
    pub goto_waits: u64,
    /// Range messages that became edges.
    pub conversions: u64,
    /// ... with part of the edge left over on the right.
    pub overlaps_left: u64,
    /// ... with part of the edge left over on the left.
    pub overlaps_right: u64,
    /// ... with parts left over on both sides.
    pub overlaps_both: u64,
    /// Shared nodes of which a private copy was made.
    pub unshares: u64,
    /// Children dropped unread under a covering range message.
    pub prunes: u64,
    /// Nodes whose references went to zero.
    pub reclaimed: u64,
    /// Ranges replaced by leaves that were written before.
    pub grafts: u64,
    /// Nodes put in order for the clones to come.
    pub mends: u64,
    /// Clones that had to do something first: to put a node in order, or to move messages out of their way.
    pub clone_waits: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
}

impl PathCounts {
    /// All counts, with their names.
    #[must_use]
    pub fn by_name(&self) -> [(&'static str, u64); 20] {
        [
            ("splits", self.splits),
            ("flushes", self.flushes),
            ("rewrites", self.rewrites),
            ("coalesces", self.coalesces),
            ("collapses", self.collapses),
            ("flattens", self.flattens),
            ("segment_merges", self.segment_merges),
            ("goto_sinks", self.goto_sinks),
            ("goto_waits", self.goto_waits),
            ("conversions", self.conversions),
            ("overlaps_left", self.overlaps_left),
            ("overlaps_right", self.overlaps_right),
            ("overlaps_both", self.overlaps_both),
            ("unshares", self.unshares),
            ("prunes", self.prunes),
            ("reclaimed", self.reclaimed),
            ("grafts", self.grafts),
            ("mends", self.mends),
            ("clone_waits", self.clone_waits),
            ("checkpoints", self.checkpoints),
        ]
    }
}

impl AddAssign for PathCounts {
    fn add_assign(&mut self, other: Self) {
        self.splits += other.splits;
        self.flushes += other.flushes;
        self.rewrites += other.rewrites;
        self.coalesces += other.coalesces;
        self.collapses += other.collapses;
        self.flattens += other.flattens;
        self.segment_merges += other.segment_merges;
        self.goto_sinks += other.goto_sinks;
        self.goto_waits += other.goto_waits;
        self.conversions += other.conversions;
        self.overlaps_left += other.overlaps_left;
        self.overlaps_right += other.overlaps_right;
        self.overlaps_both += other.overlaps_both;
        self.unshares += other.unshares;
        self.prunes += other.prunes;
        self.reclaimed += other.reclaimed;
        self.grafts += other.grafts;
        self.mends += other.mends;
        self.clone_waits += other.clone_waits;
        self.checkpoints += other.checkpoints;
    }
}

impl Inner {
    /// Bytes of the keys and values in a range that have reached leaves, about: each clone counts in full. Goes down to the two leaves in
    /// which the range begins and ends, and counts those whole.
    pub(crate) fn live_bytes(&self, range: &KeyRange) -> u64 {
        let top = self.state.lock().top.clone();
        self.live_bytes_below(&top, range)
    }

    fn live_bytes_below(&self, node: &Skeleton, range: &KeyRange) -> u64 {
        let mut sum = 0u64;
        for at in 0..node.edges.len() {
            let whole = node.edge_range(at);
            let inside = whole.intersect(range);
            let Some(child) = node.edges[at].child.as_ref().filter(|_| !inside.is_empty()) else {
                continue;
            };
            let is_cut = inside != whole && child.node.height() > 0;
            // What cannot be read counts whole.
            let below = is_cut
                .then(|| self.store.skeleton(&child.node).ok())
                .flatten();
            let bytes = below.map_or(child.live_bytes, |below| {
                self.live_bytes_below(&below, &child.xf.range(&inside))
            });
            sum = sum.saturating_add(bytes);
        }
        sum
    }

    pub(crate) fn stats(&self) -> Stats {
        let store = &self.store;
        let space = store.table.stats();
        let (buffered, buffered_ranges, root, top, seq) = {
            let state = self.state.lock();
            (
                state.buffer.memory_bytes() as u64,
                state.buffer.range_count() as u64,
                state.root.clone(),
                state.top.clone(),
                state.seq,
            )
        };
        let c = &store.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            device_bytes: self.volume_bytes.load(Ordering::Relaxed),
            logical_bytes: top.live_bytes_in(&KeyRange::all()),
            allocated_bytes: space.allocated,
            free_bytes: space.free,
            reserved_bytes: space.free - store.available_bytes().min(space.free),
            pending_free_bytes: space.pending_free,
            host_free_bytes: space.host_free,
            host_allocated_bytes: space
                .host_free
                .and_then(|_| store.dev.host_allocated_bytes().ok()),
            nodes: space.nodes,
            segments: space.segments,
            leaves: space.leaves,
            zombies: space.zombies,
            height: u64::from(root.height()),
            pending_message_bytes: buffered + store.dirty.memory_bytes(),
            buffered_ranges,
            checkpoint_age_ns: u64::try_from(self.last_checkpoint.lock().elapsed().as_nanos())
                .unwrap_or(u64::MAX),
            journal_bytes: self
                .journal
                .as_ref()
                .map_or(0, crate::journal::journal::Journal::used_bytes),
            seq,
            cache_hits: get(&c.cache_hits),
            cache_misses: get(&c.cache_misses),
            cached_bytes: store.cached_bytes(),
            node_reads: get(&c.node_reads),
            node_visits: get(&c.node_visits),
            bytes_read: get(&c.bytes_read),
            filter_denials: get(&c.filter_denials),
            leaves_ahead: get(&c.leaves_ahead),
            bytes_written: c.bytes_written(),
            written: WrittenBytes {
                journal: self.journal.as_ref().map_or(0, |j| j.written_bytes()),
                leaves: get(&c.leaf_bytes).saturating_sub(get(&c.graft_bytes)),
                grafts: get(&c.graft_bytes),
                segments: get(&c.segment_bytes),
                copied: get(&c.copied_bytes),
                skeletons: get(&c.skeleton_bytes),
            },
            paths: PathCounts {
                splits: get(&c.splits),
                flushes: get(&c.flushes),
                rewrites: get(&c.rewrites),
                coalesces: get(&c.coalesces),
                collapses: get(&c.collapses),
                flattens: get(&c.flattens),
                segment_merges: get(&c.segment_merges),
                goto_sinks: get(&c.goto_sinks),
                goto_waits: get(&c.goto_waits),
                conversions: get(&c.conversions),
                overlaps_left: get(&c.overlaps_left),
                overlaps_right: get(&c.overlaps_right),
                overlaps_both: get(&c.overlaps_both),
                unshares: get(&c.unshares),
                prunes: get(&c.prunes),
                reclaimed: get(&c.reclaimed),
                grafts: get(&c.grafts),
                mends: get(&c.mends),
                clone_waits: get(&c.clone_waits),
                checkpoints: get(&c.checkpoints),
            },
            poisoned: self.failure().map(|text| text.to_string()),
        }
    }
}
