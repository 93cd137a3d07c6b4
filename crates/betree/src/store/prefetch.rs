//! The prefetcher: reads of several nodes or blocks in one request, and of nodes that a scan will
//! reach.
//!
//! One lock is held while the nodes of one request are claimed in the cache, over no read and no
//! wait. The queue of the threads that read ahead has a lock of its own.

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::error::Result;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::run_index::index_len;
use crate::store::cache::{Cached, NodeCache};
use crate::store::device::NodeDevice;
use crate::store::handles::Handles;
use crate::store::jobs::ReadAhead;
use crate::store::read::SEGMENT_READ_BYTES_MAX;
use crate::sync::Mutex;

/// Bytes of a segment that a scan that reads on takes with its index. Most segments are no longer
/// than the end of the range, and the index of most of these is no longer than its start.
const SEGMENT_FRONT_BYTES: RangeInclusive<usize> = 64 << 10..=128 << 10;

/// Part of a segment that its index may take.
const SEGMENT_INDEX_PART: usize = 16;

/// Segments up to this length, and skeletons up to a shorter one, are read together, in bytes,
const SEGMENT_TOGETHER_BYTES: usize = *SEGMENT_FRONT_BYTES.start();

const TOGETHER_BYTES: usize = 16 << 10;

/// when no more than this lies between two of them: a disk passes over it in a tenth of the time of
/// a seek.
const BETWEEN_BYTES: u64 = 64 << 10;

/// See the module header.
pub(crate) struct Prefetcher {
    pub(crate) nodes: Arc<NodeCache>,
    pub(super) handles: Arc<Handles>,
    pub(super) device: Arc<NodeDevice>,
    pub(crate) queue: ReadAhead,
    /// About the size of a leaf, in bytes.
    leaf_bytes: usize,
    /// Held while the nodes of one request are claimed, so that two threads that want the same
    /// nodes do not get half of them each.
    claiming: Mutex<()>,
}

/// A short node that is not in the cache.
struct Short<'a> {
    place: Place,
    node: &'a Arc<Handle>,
    is_wanted: bool,
}

impl Short<'_> {
    fn start(&self) -> u64 {
        self.place.addr()
    }

    fn end(&self) -> u64 {
        self.place.addr() + u64::from(self.place.used_bytes)
    }
}

/// The number of nodes at the front of `short` that one request reads; they are in the order of the
/// device.
fn near(short: &[Short<'_>]) -> usize {
    let is_near = |(a, b): &(&Short<'_>, &Short<'_>)| {
        b.start() <= a.end() + BETWEEN_BYTES
            && b.end() - short[0].start() <= u64::from(SEGMENT_READ_BYTES_MAX)
    };
    let pairs = short.iter().zip(&short[1..]);
    1 + pairs.take_while(is_near).count()
}

impl Prefetcher {
    pub(crate) fn new(
        nodes: Arc<NodeCache>,
        handles: Arc<Handles>,
        device: Arc<NodeDevice>,
        leaf_bytes: usize,
    ) -> Self {
        Self {
            nodes,
            handles,
            device,
            queue: ReadAhead::default(),
            leaf_bytes,
            claiming: Mutex::new(()),
        }
    }

    /// Most leaves that a scan may ask the threads for at a time; 0 without threads.
    pub(crate) fn depth(&self) -> usize {
        let cache_bytes = self.nodes.capacity_bytes();
        self.queue.depth(self.leaf_bytes, cache_bytes)
    }

    /// Loads the front of a segment for a scan that reads on, as far as the cache has room: a long
    /// request if the scan wants the `whole` segment.
    pub(crate) fn load_eagerly(&self, segment: &Handle, whole: bool) -> Result<()> {
        if segment.is_fresh() || self.nodes.read_ahead_max_bytes() <= self.nodes.block_bytes {
            return Ok(());
        }
        self.nodes.cached((segment.id().0, 0), || {
            let ahead = if whole {
                SEGMENT_READ_BYTES_MAX as usize
            } else {
                let (least, most) = SEGMENT_FRONT_BYTES.into_inner();
                match self.handles.place(segment)?.used_bytes as usize {
                    short if short <= most => most,
                    long => (long / SEGMENT_INDEX_PART).clamp(least, most),
                }
            };
            self.nodes
                .load_index(segment, ahead.min(self.nodes.read_ahead_max_bytes()))
        })?;
        Ok(())
    }

    /// Loads short segments of a node: the wanted ones (with `true`) with those that lie close to
    /// them, in one request. Segments of one checkpoint lie close together. A segment that cannot
    /// be read this way is left to its readers.
    pub(crate) fn load_together<'a>(
        &self,
        segments: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
    ) {
        let longest = SEGMENT_TOGETHER_BYTES.min(self.nodes.read_ahead_max_bytes());
        self.read_together(segments, longest, |segment, place, front| {
            let len = index_len(front, place.used_bytes)?;
            let index = self.nodes.keep_front(segment, place, front, len).ok()?;
            Some(Cached::Index(Arc::new(index)))
        });
    }

    /// The same for the skeletons of neighbours, the first of which is wanted: a reader that goes
    /// on wants the others soon.
    pub(crate) fn load_neighbours<'a>(&self, nodes: impl Iterator<Item = &'a Arc<Handle>>) {
        let nodes = nodes.filter(|node| node.kind() == Kind::Skeleton);
        let nodes = nodes.enumerate().map(|(at, node)| (node, at == 0));
        self.read_together(nodes, TOGETHER_BYTES, |node, place, bytes| {
            let skeleton = self.nodes.decode_skeleton(node, place, bytes).ok()?;
            Some(Cached::Skeleton(Arc::new(skeleton)))
        });
    }

    /// Reads nodes of up to `longest` bytes that lie close to wanted nodes with them, and keeps the
    /// result of `decode` for each.
    fn read_together<'a>(
        &self,
        nodes: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
        longest: usize,
        decode: impl Fn(&Handle, &Place, &[u8]) -> Option<Cached>,
    ) {
        if self.nodes.read_ahead_max_bytes() < TOGETHER_BYTES {
            return;
        }
        let short = self.short(nodes, longest);
        let mut rest = &short[..];
        while !rest.is_empty() {
            let (group, others) = rest.split_at(near(rest));
            rest = others;
            if group.iter().any(|short| short.is_wanted) {
                self.read_group(group, &decode);
            }
        }
    }

    /// The nodes of up to `longest` bytes that are not in the cache, in the order of the device.
    fn short<'a>(
        &self,
        nodes: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
        longest: usize,
    ) -> Vec<Short<'a>> {
        let mut short = Vec::new();
        for (node, is_wanted) in nodes {
            if node.is_fresh() || self.nodes.contains(node.id()) {
                continue;
            }
            // A reader of the node gets the error.
            let Ok(place) = self.handles.place(node) else {
                continue;
            };
            if place.used_bytes as usize <= longest {
                short.push(Short {
                    place,
                    node,
                    is_wanted,
                });
            }
        }
        short.sort_unstable_by_key(Short::start);
        short
    }

    /// Reads the nodes of `group` that no other thread reads, in one request.
    fn read_group(
        &self,
        group: &[Short<'_>],
        decode: &impl Fn(&Handle, &Place, &[u8]) -> Option<Cached>,
    ) {
        // A node that another thread is reading is left to it. This thread never waits for such a
        // read while other threads wait for its own.
        let claiming = self.claiming.lock();
        let claimed = group.iter().filter_map(|short| {
            let guard = self.nodes.claim(short.node.id())?;
            Some((short, guard))
        });
        let claimed = claimed.collect::<Vec<_>>();
        drop(claiming);
        let [(first, _), .., (last, _)] = &claimed[..] else {
            return;
        };
        let start = first.start();
        let len = usize::try_from(last.end() - start).expect("some segments fit memory");
        let Ok(bytes) = self.device.read(start, len) else {
            return;
        };
        for (short, guard) in claimed {
            let from = (short.start() - start) as usize;
            // Two places that overlap are forged.
            let kept = bytes
                .get(from..from + short.place.used_bytes as usize)
                .and_then(|bytes| decode(short.node, &short.place, bytes));
            if let Some(kept) = kept {
                // The cache drops the part if it has given its place away meanwhile.
                let _ = guard.insert(kept);
            }
        }
    }
}
