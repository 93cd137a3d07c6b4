//! The space that ranges take, and the part of it that only they use: from the node table,
//! skeletons and the front parts of segments and of the few leaves at the borders. Leaves are read
//! where many messages wait over them.
//!
//! A node belongs to the ranges alone when all its references come from nodes that belong to them
//! alone, or from the nodes on the way to them. So the walk goes down to the references that lie
//! within the ranges, counts them, and follows the child lists of the node table below every node
//! whose references are all counted. A node that is reached and not counted in full is shared. A
//! run that straddles a border belongs to the node that refers to it; its part is estimated by
//! blocks.
//!
//! The readable bytes below an edge without waiting messages are those that the edge tells. Where
//! messages wait over a leaf, it depends on the leaf whether they add or replace, so leaf and
//! messages are merged as by a scan. That costs reads of the leaves with many messages only: over a
//! leaf with less than [`FEW`] of its bytes they are left out.
//!
//! All numbers are of one checkpoint, since only a checkpoint knows the counts. The walk pins it, and
//! later checkpoints go on meanwhile.

use std::collections::HashMap;
use std::sync::Arc;

use ramet_nodetable::{NodeId, NodeRecord, TablePin};

use crate::depth::{DEPTH_MAX, with_stack};
use crate::error::{Error, Result};
use crate::id_set::IdSet;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::node::run_view::RunView;
use crate::node::skeleton::Skeleton;
use crate::read::cursor::MappedCursor;
use crate::read::cut::{Base, check_falls, cut};
use crate::read::diff::Span;
use crate::read::scan::{Frame, TreeScan};
use crate::store::cache::NodeCache;
use crate::store::prefetch::Prefetcher;
use crate::store::store::Store;

/// Messages of less than this part of a leaf are left out of its readable bytes.
const FEW: u64 = 256;
/// Nodes below so many others count as their edges tell.
const LOGICAL_DEPTH_MAX: usize = 4 * DEPTH_MAX;

/// Space of some ranges, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Keys and values that can be read, to some percent at most. Data shared with other ranges counts
    /// in full. Keys count as nodes store them: without a prefix that all keys of a node share.
    pub logical_bytes: u64,
    /// Space that these ranges share with others.
    pub shared_bytes: u64,
    /// Space that only these ranges use. It comes back when they are deleted. More may come back:
    /// messages that other ranges share and have flushed already stay until the last of these
    /// ranges is gone.
    pub exclusive_bytes: u64,
}

/// A checkpoint whose records and nodes stay as they are, while later ones are written.
pub(crate) struct Pinned {
    table: TablePin,
    /// `None` for the root of an empty tree.
    root: Option<Arc<Handle>>,
}

impl Pinned {
    /// Pins the newest checkpoint, with this root. No other is written meanwhile.
    pub(crate) fn newest(store: &Store, root: u64) -> Result<Self> {
        let table = store.table.pin();
        if root == 0 {
            return Ok(Self { table, root: None });
        }
        let id = NodeId(root);
        let record = table.get(id)?.ok_or_else(|| missing(id))?;
        let root = store.handles.recorded(id, Kind::Skeleton, record.height);
        let root = Some(root.ok_or_else(|| missing(id))?);
        Ok(Self { table, root })
    }

    /// Whether everything that was read was of the checkpoint.
    pub(crate) fn is_whole(&self) -> bool {
        self.table.is_whole()
    }
}

/// The usage of `spans` under the root of a pinned checkpoint.
pub(crate) fn usage_of(store: &Store, pinned: &Pinned, spans: &[Span]) -> Result<Usage> {
    Walk::run(store, pinned, spans)
}

/// The space that only `spans` use under the root of a pinned checkpoint, in bytes.
pub(crate) fn exclusive_of(store: &Store, pinned: &Pinned, spans: &[Span]) -> Result<u64> {
    let mut walk = Walk::new(store, pinned);
    walk.reach_all(pinned, spans)?;
    walk.take_exclusive()?;
    Ok(walk.usage.exclusive_bytes)
}

pub(crate) struct Walk<'a> {
    prefetch: &'a Prefetcher,
    nodes: &'a NodeCache,
    table: &'a TablePin,
    /// References found so far that go when the ranges go.
    counted: HashMap<NodeId, u64>,
    /// Logical bytes of parts of nodes: a chain of doubling clones leads to each of its nodes very
    /// often.
    known: HashMap<(NodeId, KeyRange), u64>,
    usage: Usage,
    /// Nodes above the one that is visited.
    depth: usize,
}

impl<'a> Walk<'a> {
    fn new(store: &'a Store, pinned: &'a Pinned) -> Self {
        Self {
            prefetch: &store.prefetch,
            nodes: &store.nodes,
            table: &pinned.table,
            counted: HashMap::new(),
            known: HashMap::new(),
            usage: Usage::default(),
            depth: 0,
        }
    }

    /// Visits a node below the one that is visited.
    fn below<T>(&mut self, visit: impl FnOnce(&mut Self) -> T) -> T {
        self.depth += 1;
        let found = with_stack(|| visit(self));
        self.depth -= 1;
        found
    }

    fn run(store: &'a Store, pinned: &'a Pinned, spans: &[Span]) -> Result<Usage> {
        let mut walk = Self::new(store, pinned);
        let Some(root) = &pinned.root else {
            return Ok(walk.usage);
        };
        walk.reach_all(pinned, spans)?;
        for span in spans.iter().filter(|span| !span.keys().is_empty()) {
            let logical = walk.logical(root, span.keys())?;
            walk.usage.logical_bytes = walk.usage.logical_bytes.saturating_add(logical);
        }
        walk.finish()?;
        Ok(walk.usage)
    }

    /// Finds the references that lie within the ranges.
    fn reach_all(&mut self, pinned: &Pinned, spans: &[Span]) -> Result<()> {
        let Some(root) = &pinned.root else {
            return Ok(());
        };
        let is_private = self.record(root.id())?.refs == 1;
        for span in spans.iter().filter(|span| !span.keys().is_empty()) {
            self.border(root, span.keys(), is_private)?;
        }
        Ok(())
    }

    fn record(&self, id: NodeId) -> Result<NodeRecord> {
        self.table.get(id)?.ok_or_else(|| missing(id))
    }

    /// A reference that lies within the ranges; `private` says whether the node that holds it is
    /// private.
    fn reach(&mut self, id: NodeId, private: bool) {
        *self.counted.entry(id).or_default() += u64::from(private);
    }

    /// A node that may lie in `range` in part only; `private`: only one path leads to it.
    fn border(&mut self, node: &Arc<Handle>, range: &KeyRange, private: bool) -> Result<()> {
        if node.kind() != Kind::Skeleton {
            let (_, stored) = part_of_run(&self.nodes.run(node)?, range);
            self.take(stored, private);
            return Ok(());
        }
        let skeleton = self.nodes.skeleton(node)?;
        for at in 0..skeleton.edges.len() {
            let edge = skeleton.edge_range(at);
            if let Some(child) = &skeleton.edges[at].child {
                self.descend(&child.node, &child.translation, &edge, range, private)?;
            }
        }
        for seg in &skeleton.segs {
            let clip = seg.clip.intersect(range);
            if clip.is_empty() {
                continue;
            }
            if range.covers(&seg.clip) {
                self.reach(seg.run.id(), private);
                continue;
            }
            let run = self.nodes.run(&seg.run)?;
            let private = private && self.record(seg.run.id())?.refs == 1;
            let inside = seg.translation.range(&clip);
            self.take(part_of_run(&run, &inside).1, private);
            // A GOTO belongs to the ranges if the ranges see all of its clip.
            for (whole, msg) in gotos_in(&run, &inside) {
                if let RangeMsg::Goto(target) = msg {
                    check_falls(
                        node.height(),
                        &Base::Node(target.node.clone(), Translation::identity()),
                    )?;
                    self.descend(&target.node, &target.translation, &whole, &inside, private)?;
                }
            }
        }
        Ok(())
    }

    /// A reference that shows the node in the range `whole` of the keys of the referring node.
    fn descend(
        &mut self,
        node: &Arc<Handle>,
        translation: &Translation,
        whole: &KeyRange,
        range: &KeyRange,
        private: bool,
    ) -> Result<()> {
        let part = whole.intersect(range);
        if part.is_empty() {
            return Ok(());
        }
        if range.covers(whole) {
            self.reach(node.id(), private);
            return Ok(());
        }
        let private = private && self.record(node.id())?.refs == 1;
        if self.depth >= DEPTH_MAX {
            // The border lies deeper than any path that is shown.
            self.reach(node.id(), false);
            return Ok(());
        }
        self.below(|walk| walk.border(node, &translation.range(&part), private))
    }

    fn take(&mut self, bytes: u64, private: bool) {
        if private {
            self.usage.exclusive_bytes += bytes;
        } else {
            self.usage.shared_bytes += bytes;
        }
    }

    /// Follows the child lists: first below nodes to which only the ranges refer, then below the
    /// rest.
    fn finish(&mut self) -> Result<()> {
        let (exclusive, mut shared) = self.take_exclusive()?;
        let mut seen = IdSet::default();
        while let Some(id) = shared.pop() {
            if exclusive.contains(id) || !seen.insert(id) {
                continue;
            }
            let record = self.record(id)?;
            self.usage.shared_bytes += record.extent.len;
            shared.extend(record.children);
        }
        Ok(())
    }

    /// Counts the nodes to which only the ranges refer. Returns them, and the nodes that they share
    /// with others.
    fn take_exclusive(&mut self) -> Result<(IdSet, Vec<NodeId>)> {
        let mut todo: Vec<NodeId> = self.counted.keys().copied().collect();
        let mut exclusive = IdSet::default();
        let mut shared: Vec<NodeId> = Vec::new();
        while let Some(id) = todo.pop() {
            let record = self.record(id)?;
            if exclusive.contains(id) {
                continue;
            }
            if self.counted.get(&id).is_none_or(|refs| *refs < record.refs) {
                shared.push(id);
                continue;
            }
            exclusive.insert(id);
            self.counted.remove(&id);
            self.usage.exclusive_bytes += record.extent.len;
            for child in record.children {
                self.reach(child, true);
                todo.push(child);
            }
        }
        Ok((exclusive, shared))
    }

    /// Bytes of keys and values in `range` of a node.
    fn logical(&mut self, node: &Arc<Handle>, range: &KeyRange) -> Result<u64> {
        if node.kind() != Kind::Skeleton {
            return Ok(part_of_run(&self.nodes.run(node)?, range).0);
        }
        let part = (node.id(), range.clone());
        if let Some(&known) = self.known.get(&part) {
            return Ok(known);
        }
        let sum = if self.depth < LOGICAL_DEPTH_MAX {
            self.below(|walk| walk.logical_of_skeleton(node, range))?
        } else {
            self.nodes.skeleton(node)?.live_bytes_in(range)
        };
        self.known.insert(part, sum);
        Ok(sum)
    }

    fn logical_of_skeleton(&mut self, node: &Arc<Handle>, range: &KeyRange) -> Result<u64> {
        let skeleton = self.nodes.skeleton(node)?;
        let mut sum = 0u64;
        let mut lo = range.lo.clone();
        loop {
            let piece = cut(self.nodes, &skeleton, &lo, range.hi.clone(), None)?;
            let here = KeyRange::new(lo, piece.hi.clone());
            let overlays = self.with_points(&piece.overlays, &here)?;
            if !overlays.is_empty() {
                check_falls(node.height(), &piece.base)?;
                sum = sum.saturating_add(self.overlaid(Frame {
                    range: here,
                    reach: piece.hi.clone(),
                    base: piece.base,
                    overlays,
                })?);
            } else if let Base::Node(child, translation) = &piece.base {
                check_falls(node.height(), &piece.base)?;
                let below = match whole_leaf(&skeleton, &here, child) {
                    Some(live_bytes) => live_bytes,
                    None => self.logical(child, &translation.range(&here))?,
                };
                sum = sum.saturating_add(below);
            }
            match piece.hi {
                Some(hi) if Some(&hi) != range.hi.as_ref() => lo = hi,
                _ => return Ok(sum),
            }
        }
    }

    /// The overlays that have a point in `range`. The answer is exact: so a chain of doubling clones
    /// is followed as far as there are points, and no further.
    fn with_points(
        &self,
        overlays: &[(RunView, Translation)],
        range: &KeyRange,
    ) -> Result<Arc<[(RunView, Translation)]>> {
        let mut found = Vec::new();
        for (run, translation) in overlays {
            if part_of_run(run, &translation.range(range)).0 > 0
                && MappedCursor::new(run, range, translation, 0).advance(self.nodes)?
            {
                found.push((run.clone(), translation.clone()));
            }
        }
        Ok(found.into())
    }

    /// Bytes of keys and values of a piece that messages wait over.
    fn overlaid(&mut self, frame: Frame) -> Result<u64> {
        let frame = Frame {
            overlays: self.with_points(&frame.overlays, &frame.range)?,
            ..frame
        };
        let waiting = frame.overlays.iter().map(|(run, translation)| {
            let range = translation.range(&frame.range);
            part_of_run(run, &range).0
        });
        let waiting = waiting.fold(0, u64::saturating_add);
        if let Base::Node(child, translation) = &frame.base {
            let range = translation.range(&frame.range);
            if frame.overlays.is_empty() {
                return self.logical(child, &range);
            }
            if child.kind() == Kind::Skeleton {
                if self.depth >= LOGICAL_DEPTH_MAX {
                    return self.logical(child, &range);
                }
                return self.overlaid_children(frame);
            }
            let (below, _) = part_of_run(&self.nodes.run(child)?, &range);
            if waiting.saturating_mul(FEW) < below {
                return Ok(below);
            }
        }
        let mut scan = TreeScan::of_frames(vec![frame]);
        let mut sum = 0u64;
        while scan.advance(self.prefetch)? {
            sum = sum.saturating_add((scan.key().len() + scan.value().len()) as u64);
        }
        Ok(sum)
    }

    /// The same for a piece over an interior node, which is cut into the pieces of its children.
    fn overlaid_children(&mut self, frame: Frame) -> Result<u64> {
        let mut scan = TreeScan::of_frames(Vec::new());
        scan.open(self.prefetch, frame)?;
        let mut sum = 0u64;
        for piece in std::mem::take(&mut scan.frames) {
            sum = sum.saturating_add(self.below(|walk| walk.overlaid(piece))?);
        }
        Ok(sum)
    }
}

/// Bytes below the edge whose range is all of `piece`, if it leads to the leaf `child`. Interior
/// children are opened: the messages that wait in them are no part of their live bytes.
fn whole_leaf(skeleton: &Skeleton, piece: &KeyRange, child: &Arc<Handle>) -> Option<u64> {
    let at = skeleton.edge_of(&piece.lo);
    let edge = skeleton.edges[at].child.as_ref()?;
    let is_whole = skeleton.edge_range(at) == *piece && edge.node.id() == child.id();
    (is_whole && child.kind() == Kind::Leaf).then_some(edge.live_bytes)
}

/// The range messages that overlap `range`, not clipped.
fn gotos_in(run: &RunView, range: &KeyRange) -> Vec<(KeyRange, RangeMsg)> {
    match run {
        RunView::Disk(run) => run.index.ranges_in(range).cloned().collect(),
        RunView::Mem(run) => run
            .ranges_in(range)
            .map(|(lo, e)| (KeyRange::new(lo.clone(), e.hi.clone()), e.msg.clone()))
            .collect(),
    }
}

/// Bytes of the points of a run in `range`, before and after compression. A block that straddles a
/// border counts half.
fn part_of_run(run: &RunView, range: &KeyRange) -> (u64, u64) {
    let run = match run {
        RunView::Mem(run) => {
            let bytes = run.measure_pressure(range, true).bytes as u64;
            return (bytes, bytes);
        }
        RunView::Disk(run) => run,
    };
    let blocks = &run.index.blocks;
    let mut sum = (0, 0);
    for at in run.index.block_of(&range.lo).unwrap_or(0)..blocks.len() {
        let end = blocks.get(at + 1).map(|next| next.first_key.clone());
        let block = KeyRange::new(blocks[at].first_key.clone(), end);
        if block.intersect(range).is_empty() {
            break;
        }
        // The last block has no known end. It counts as whole when the range begins before it.
        let last = block.hi.is_none() && range.contains(&block.lo);
        let part = 2 - u64::from(!(last || range.covers(&block)));
        sum.0 += u64::from(blocks[at].raw_bytes) * part / 2;
        sum.1 += u64::from(blocks[at].stored_bytes) * part / 2;
    }
    sum
}

fn missing(id: NodeId) -> Error {
    Error::Corrupt {
        what: "node table",
        addr: 0,
        detail: format!("node {} is referred to and has no record", id.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::buffer::Buffer;
    use crate::node::message::Target;
    use crate::reshape::make::NodeMaker;
    use ramet_block::{Device, MemDevice};

    /// A walk that followed forged messages like this one could go round in a circle for ever.
    #[test]
    fn a_goto_that_does_not_lead_down_is_corrupt() {
        let store = crate::testing::store();
        let level = store
            .handles
            .new_skeleton(Skeleton::empty(1, KeyRange::all()));
        let mut run = Buffer::default();
        let target = Target {
            translation: Translation::identity(),
            node: level,
        };
        let range = |lo: &'static str, hi: &'static str| KeyRange::new(lo.into(), Some(hi.into()));
        run.add_range(range("a", "c"), RangeMsg::Goto(target));
        let mut forged = Skeleton::empty(1, KeyRange::all());
        NodeMaker::of(&store).push_run(&mut forged, run);
        let forged = store.handles.new_skeleton(forged);
        let pin = store.table.pin();
        let mut walk = Walk {
            prefetch: &store.prefetch,
            nodes: &store.nodes,
            table: &pin,
            counted: HashMap::new(),
            known: HashMap::new(),
            usage: Usage::default(),
            depth: 0,
        };
        let found = walk.border(&forged, &range("b", "d"), false);
        assert!(matches!(found, Err(Error::Corrupt { .. })), "{found:?}");
    }

    /// Every round holds the keys of the round before twice: 2^70 of them in the end.
    #[test]
    fn a_count_beyond_the_greatest_number_stays_at_it() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(32 << 20));
        crate::Tree::format(&dev, &crate::FormatOptions::default()).expect("formats");
        let options = crate::OpenOptions {
            manual: true,
            ..crate::OpenOptions::default()
        };
        let tree = crate::Tree::open(dev, options).expect("opens");
        let mut batch = crate::Batch::new();
        for n in 0..2000 {
            batch.put(format!("0/{n}"), vec![7; 100]);
        }
        tree.apply(batch).expect("there is room");
        for round in 1..=70 {
            let source = format!("{}/", round - 1);
            for half in ["a", "b"] {
                let mut batch = crate::Batch::new();
                batch.clone_prefix(source.clone(), format!("{round}/{half}/"));
                tree.apply(batch).expect("there is room");
            }
            tree.checkpoint().expect("there is room");
        }
        let usage = tree
            .usage(&[Span::prefix("70/"), Span::prefix("69/")])
            .expect("reads");
        assert_eq!(usage.logical_bytes, u64::MAX);
    }
}
