//! Rewriting of leaves: unsharing, splitting, merging and relifting of leaves are this one
//! operation.

use crate::counters::Counters;
use crate::reshape::pending::Survey;
use crate::shape::TreeShape;
use crate::store::prefetch::Prefetcher;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_nodetable::NodeId;

use crate::error::{Error, Result};
use crate::key::range::{KeyRange, shared_prefix};
use crate::key::translation::Translation;
use crate::node::handle::Kind;
use crate::node::run_builder::RunBuilder;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::read::cut::Base;
use crate::read::scan::TreeScan;
use crate::reshape::gather::PUSH_BYTES;
use crate::reshape::pending::Pending;
use crate::store::store::Store;
use crate::store::write::{Via, WriteBack};

/// Writes leaves anew.
#[derive(Clone, Copy)]
pub(crate) struct LeafRewriter<'a> {
    prefetch: &'a Prefetcher,
    write_back: &'a WriteBack,
    space: &'a Space,
    debt: &'a SpaceDebt,
    survey: Survey<'a>,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> LeafRewriter<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            prefetch: &store.prefetch,
            write_back: &store.write_back,
            space: &store.space,
            debt: &store.space_debt,
            survey: Survey::of(store),
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// Streams the ranges of edges `from..=to`, with all messages for them, into new leaves.
    pub(crate) fn rewrite(&self, node: &Skeleton, from: usize, to: usize) -> Result<Vec<Edge>> {
        self.rewrite_via(node, (from, to), Via::Cache)
    }

    /// The same. Past the cache of the device, the old and the new leaves stay out of the cache of
    /// nodes as well.
    pub(crate) fn rewrite_via(
        &self,
        node: &Skeleton,
        (from, to): (usize, usize),
        via: Via,
    ) -> Result<Vec<Edge>> {
        for edge in &node.edges[from..=to] {
            if self.survey.is_shared(edge)? {
                self.counters.took(StructuralPath::Unshares);
            }
        }
        let range = KeyRange::new(node.edges[from].lo.clone(), node.edge_hi(to));
        let draft = node.clipped(&range);
        let mut scan = TreeScan::of_base(Base::Draft(Arc::new(draft)), range.clone());
        if matches!(via, Via::Bulk) {
            let bytes = node.edges[from..=to].iter().map(Edge::live_bytes).sum();
            scan.drop_behind(bytes);
        }
        let mut writer = LeafWriter::new(
            (self.write_back, self.space, self.shape),
            range.lo.clone(),
            node.next_step(),
            via,
        );
        while let Some((key, value)) = scan.next(self.prefetch)? {
            writer.add(key, value)?;
        }
        let edges = writer.finish(range.hi)?;
        self.counters.took(StructuralPath::Rewrites);
        Ok(edges)
    }

    /// Joins runs of neighbouring small leaves, so that deletions do not leave crumbs. A leaf that
    /// other nodes show too stays as it is: its bytes would be there twice.
    pub(crate) fn coalesce(&self, node: &mut Skeleton, pending: &mut Vec<Pending>) -> Result<()> {
        let over_fanout = node.width() > self.shape.fanout;
        let size = |edge: &Edge, p: &Pending| match &edge.child {
            None => Some(p.bytes),
            Some(c) if c.node.kind() == Kind::Leaf => {
                let live = usize::try_from(c.live_bytes).unwrap_or(usize::MAX);
                Some(live.saturating_add(p.bytes))
            }
            Some(_) => None,
        };
        let least = if over_fanout { 2 } else { 4 };
        let mut edges_to: HashMap<NodeId, u64> = HashMap::new();
        for child in node.edges.iter().filter_map(|edge| edge.child.as_ref()) {
            *edges_to.entry(child.node.id()).or_default() += 1;
        }
        let is_of_node = |edge: &Edge| match &edge.child {
            Some(child) if self.survey.is_marked(&child.node) => Ok(false),
            Some(child) => Ok(self.survey.refs(&child.node)? <= edges_to[&child.node.id()]),
            None => Ok::<_, Error>(true),
        };
        let mut from = 0;
        while from < node.edges.len() {
            let (mut to, mut sum, mut leaves) = (from, 0, 0);
            while to < node.edges.len() {
                match size(&node.edges[to], &pending[to]) {
                    Some(bytes)
                        if bytes <= self.shape.leaf_bytes / 2 - sum
                            && is_of_node(&node.edges[to])? =>
                    {
                        sum += bytes;
                    }
                    _ => break,
                }
                leaves += usize::from(node.edges[to].child.is_some());
                to += 1;
            }
            let joined = if leaves >= least {
                let reserved = self.space.reserve_spare(sum as u64).map(drop);
                self.debt
                    .if_possible(reserved.and_then(|()| self.rewrite(node, from, to - 1)))?
            } else {
                None
            };
            if let Some(edges) = joined {
                self.counters.took(StructuralPath::Coalesces);
                let made = edges.len();
                pending.splice(from..to, std::iter::repeat_n(Pending::default(), made));
                node.edges.splice(from..to, edges);
                from += made;
            } else {
                from = to.max(from + 1);
            }
        }
        Ok(())
    }
}

/// Cuts a stream of keys into leaves.
pub(crate) struct LeafWriter<'a> {
    write_back: &'a WriteBack,
    space: &'a Space,
    shape: &'a TreeShape,
    entries: Vec<(Bytes, Bytes)>,
    bytes: usize,
    /// Start of the range of the next leaf.
    lo: Bytes,
    watermark: u64,
    via: Via,
    edges: Vec<Edge>,
}

fn entry_bytes(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 8
}

impl<'a> LeafWriter<'a> {
    /// The edges to the leaves start at `lo` and get `watermark`.
    pub(crate) fn new(
        (write_back, space, shape): (&'a WriteBack, &'a Space, &'a TreeShape),
        lo: Bytes,
        watermark: u64,
        via: Via,
    ) -> Self {
        Self {
            write_back,
            space,
            shape,
            entries: Vec::new(),
            bytes: 0,
            lo,
            watermark,
            via,
            edges: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, key: Bytes, value: Bytes) -> Result<()> {
        self.bytes += entry_bytes(&key, &value);
        self.entries.push((key, value));
        if self.bytes >= self.shape.leaf_bytes * 5 / 4 && self.entries.len() > 1 {
            self.cut()?;
        }
        Ok(())
    }

    /// Writes a leaf of three to five quarters of the target size, cut where neighbours differ
    /// early.
    fn cut(&mut self) -> Result<()> {
        let target = self.shape.leaf_bytes;
        // Values that together have the target size stay in one leaf with their keys: a file is
        // read in parts of that size.
        let most = target + target / 128;
        let mut sum = 0;
        let mut best: Option<(usize, usize)> = None;
        for at in 1..self.entries.len() {
            let (key, value) = &self.entries[at - 1];
            sum += entry_bytes(key, value);
            let shared = shared_prefix(key, &self.entries[at].0);
            let late = at + 1 == self.entries.len() && best.is_none();
            // Of equal cuts the one next to the target size.
            let is_better = |(least, _)| shared < least || shared == least && sum <= most;
            if (sum >= target * 3 / 4 || late) && best.is_none_or(is_better) {
                best = Some((shared, at));
            }
        }
        let Some((shared, at)) = best else {
            return Ok(());
        };
        // The shortest key above the left part and not above the right part.
        let pivot = self.entries[at].0.slice(..=shared);
        let rest = self.entries.split_off(at);
        let left = std::mem::replace(&mut self.entries, rest);
        self.bytes = self.entries.iter().map(|(k, v)| entry_bytes(k, v)).sum();
        let range = KeyRange::new(self.lo.clone(), Some(pivot.clone()));
        self.write(range, &left)?;
        self.lo = pivot;
        Ok(())
    }

    fn write(&mut self, range: KeyRange, entries: &[(Bytes, Bytes)]) -> Result<()> {
        if entries.is_empty() {
            self.edges.push(Edge {
                lo: range.lo,
                watermark: self.watermark,
                child: None,
            });
            return Ok(());
        }
        let lift = range.common_prefix_len();
        let mut builder = RunBuilder::new(Kind::Leaf, self.shape.codec, self.shape.block_bytes);
        for (key, value) in entries {
            builder.add_put(&key[lift..], value);
        }
        let live_bytes = entries.iter().map(|(k, v)| entry_bytes(k, v) as u64).sum();
        let image = builder.finish(std::iter::empty());
        let fragments = image.bytes.len() > self.shape.leaf_bytes / 16
            && self.space.unreserved_bytes() > image.bytes.len() as u64 + PUSH_BYTES;
        let node = match self.write_back.write_run(image, self.via) {
            Err(Error::NoSpace) if fragments && entries.len() > 1 => {
                // There is space, and no hole that is long enough.
                let (left, right) = entries.split_at(entries.len() / 2);
                let pivot = right[0]
                    .0
                    .slice(..=shared_prefix(&left[left.len() - 1].0, &right[0].0));
                self.write(KeyRange::new(range.lo, Some(pivot.clone())), left)?;
                return self.write(KeyRange::new(pivot, range.hi), right);
            }
            done => done?,
        };
        let child = Child {
            translation: Translation::stripping(lift),
            node,
            live_bytes,
        };
        self.edges.push(Edge {
            lo: range.lo,
            watermark: self.watermark,
            child: Some(child),
        });
        Ok(())
    }

    pub(crate) fn finish(mut self, hi: Option<Bytes>) -> Result<Vec<Edge>> {
        let left = std::mem::take(&mut self.entries);
        let range = KeyRange::new(self.lo.clone(), hi);
        self.write(range, &left)?;
        Ok(self.edges)
    }
}
