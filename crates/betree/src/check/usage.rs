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
//! The readable bytes are counted by `logical.rs`.
//!
//! All numbers are of one checkpoint, since only a checkpoint knows the counts. The walk pins it, and
//! later checkpoints go on meanwhile.

use std::collections::HashMap;
use std::sync::Arc;

use ramet_nodetable::{NodeId, NodeRecord, TablePin};

use crate::check::logical::{Readable, part_of_run};
use crate::depth::{DEPTH_MAX, with_stack};
use crate::error::{Error, Result};
use crate::id_set::IdSet;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::node::run_view::RunView;
use crate::read::cut::{Base, check_falls};
use crate::read::diff::Span;
use crate::store::cache::NodeCache;
use crate::store::store::Store;

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
    nodes: &'a NodeCache,
    table: &'a TablePin,
    /// References found so far that go when the ranges go.
    counted: HashMap<NodeId, u64>,
    usage: Usage,
    /// Nodes above the one that is visited.
    depth: usize,
}

impl<'a> Walk<'a> {
    fn new(store: &'a Store, pinned: &'a Pinned) -> Self {
        Self {
            nodes: &store.nodes,
            table: &pinned.table,
            counted: HashMap::new(),
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
        let mut readable = Readable::in_full(store);
        for span in spans.iter().filter(|span| !span.keys().is_empty()) {
            let logical = readable.below(root, span.keys())?;
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
            self.usage.shared_bytes += record.owned_bytes();
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
            self.usage.exclusive_bytes += record.owned_bytes();
            for child in record.children {
                self.reach(child, true);
                todo.push(child);
            }
        }
        Ok((exclusive, shared))
    }
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
    use crate::node::skeleton::Skeleton;
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
            nodes: &store.nodes,
            table: &pin,
            counted: HashMap::new(),
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
