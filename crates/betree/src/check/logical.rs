//! The bytes of keys and values that can be read, each clone counted in full.
//!
//! Below an edge without waiting messages they are those that the edge tells. Where messages wait
//! over a leaf, it depends on the leaf whether they add or replace, so leaf and messages are merged
//! as by a scan. That costs reads of the leaves with many messages only: over a leaf with less than
//! [`FEW`] of its bytes they are left out.
//!
//! `ramet du` counts in full. `ramet stat` has a *limit*: of work, and on a mount it looks only at
//! nodes in memory. Parts beyond the limit count as the edges over them tell, without the messages,
//! and the answer is an estimate. No lock is held meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use ramet_nodetable::NodeId;

use crate::depth::{DEPTH_MAX, with_stack};
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::run_view::RunView;
use crate::node::skeleton::Skeleton;
use crate::read::cursor::MappedCursor;
use crate::read::cut::{Base, Cut, check_falls, cut};
use crate::read::lookup::View;
use crate::read::scan::{Frame, TreeScan, frames_of_view};
use crate::store::cache::NodeCache;
use crate::store::prefetch::Prefetcher;
use crate::store::resident::resident_if;
use crate::store::store::Store;

/// Messages of less than this part of a leaf are left out of its readable bytes.
const FEW: u64 = 256;
/// Nodes below so many others count as their edges tell.
const LOGICAL_DEPTH_MAX: usize = 4 * DEPTH_MAX;

/// Bytes of a leaf and its messages that are merged in one step of the work: about a block.
const STEP_BYTES: u64 = 16 << 10;
/// Pieces and blocks of leaves that a count with a limit goes through.
const WORK_MAX: u64 = 1 << 13;
/// Pieces of nodes in memory that it cuts beyond that, for an estimate.
const CUTS_MAX: u64 = 1 << 16;

/// Readable bytes of a whole tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logical {
    /// Bytes of keys and values, each clone counted in full. Unless it is an estimate, it is right
    /// to two percent for values up to some 10 KiB, which blocks of files are: few messages over a
    /// leaf are left out, and each may delete a value.
    pub bytes: u64,
    /// Whether parts were counted as their edges tell, without the messages over them: to look at
    /// them would have taken too long.
    pub is_estimate: bool,
}

/// The work and the reads that are left of a count.
struct Limit {
    work: u64,
    /// Whether nodes are looked at in memory only.
    is_resident: bool,
    /// Pieces that are cut beyond the work.
    cuts: u64,
}

/// A count of readable bytes.
pub(crate) struct Readable<'a> {
    prefetch: &'a Prefetcher,
    nodes: &'a NodeCache,
    /// Bytes of parts of nodes: a chain of doubling clones leads to each of its nodes very often.
    known: HashMap<(NodeId, KeyRange), u64>,
    /// Nodes above the one that is visited.
    depth: usize,
    /// The root, if it is known.
    top: Option<(NodeId, Arc<Skeleton>)>,
    /// `None`: as much as it takes.
    limit: Option<Limit>,
    is_estimate: bool,
}

/// The bytes of all that a view shows, within the limit; if it `is_resident`, from nodes in memory.
/// `top` is the root of the view, which the tree has in memory although the cache may not.
pub(crate) fn logical_of(
    store: &Store,
    (view, top): (&View, Option<Arc<Skeleton>>),
    is_resident: bool,
) -> Logical {
    let mut readable = Readable::in_full(store);
    readable.limit = Some(Limit {
        work: WORK_MAX,
        is_resident,
        cuts: CUTS_MAX,
    });
    readable.top = top.map(|top| (view.root.id(), top));
    let root = readable.skeleton(&view.root).ok().flatten();
    let mut told = HashSet::new();
    let mut bytes = 0u64;
    for frame in frames_of_view(view, KeyRange::all(), &Translation::identity()) {
        let (range, base) = (frame.range.clone(), frame.base.clone());
        let found = readable.overlaid(frame).or_else(|error| {
            readable.note_estimate(&error);
            Ok::<_, Error>(match (&base, &root) {
                (Base::Node(node, _), Some(root)) if node.id() == view.root.id() => {
                    told_once(root, &range, &mut told)
                }
                (base, _) => readable.told_by(base, &range),
            })
        });
        bytes = bytes.saturating_add(found.unwrap_or(0));
    }
    Logical {
        bytes,
        is_estimate: readable.is_estimate,
    }
}

impl<'a> Readable<'a> {
    /// A count without a limit.
    pub(crate) fn in_full(store: &'a Store) -> Self {
        Self {
            prefetch: &store.prefetch,
            nodes: &store.nodes,
            known: HashMap::new(),
            depth: 0,
            top: None,
            limit: None,
            is_estimate: false,
        }
    }

    /// Runs a step that takes so much work; an error when the limit is reached.
    fn step<T>(&mut self, work: u64, step: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let Some(limit) = &mut self.limit else {
            return step(self);
        };
        let left = limit.work.checked_sub(work);
        limit.work = left.unwrap_or(0);
        left.ok_or(Error::NotResident)?;
        let is_resident = limit.is_resident;
        resident_if(is_resident, || step(self))
    }

    /// Runs a step that cuts a piece. Nodes that are begun are cut to their end, for the estimate.
    fn cut(&mut self, step: impl FnOnce(&mut Self) -> Result<Cut>) -> Result<Cut> {
        match &mut self.limit {
            Some(limit) if limit.work == 0 => {
                limit.cuts = limit.cuts.checked_sub(1).ok_or(Error::NotResident)?;
                resident_if(true, || step(self))
            }
            _ => self.step(1, step),
        }
    }

    /// A part counts as its edges tell, because of this error.
    fn note_estimate(&mut self, error: &Error) {
        if !matches!(error, Error::NotResident) {
            tracing::warn!(%error, "readable bytes are estimated");
        }
        self.is_estimate = true;
    }

    /// The bytes of a `piece` that is shown in `here` of a node: those found, or an estimate if
    /// there is a limit. No error ends the count then.
    fn or_estimate(
        &mut self,
        found: Result<u64>,
        (node, here, told): (&Skeleton, &KeyRange, &mut HashSet<usize>),
        (base, range): (&Base, &KeyRange),
    ) -> Result<u64> {
        match found {
            Err(error) if self.limit.is_some() => {
                self.note_estimate(&error);
                Ok(match is_of_edge(node, here, base) {
                    true => told_once(node, here, told),
                    false => self.told_by(base, range),
                })
            }
            found => found,
        }
    }

    /// The bytes that the edges of a base tell, if it is in memory.
    fn told_by(&self, base: &Base, range: &KeyRange) -> u64 {
        let Base::Node(node, translation) = base else {
            return 0;
        };
        let range = translation.range(range);
        let told = |node: Arc<Skeleton>| {
            // An edge that the range cuts may show far more than the part.
            let whole = (0..node.edges.len()).filter(|at| range.covers(&node.edge_range(*at)));
            let edges = whole.filter_map(|at| node.edges[at].child.as_ref());
            edges
                .map(|child| child.live_bytes)
                .fold(0, u64::saturating_add)
        };
        self.nodes.skeleton_at_hand(node).map_or(0, told)
    }

    /// The node, unless it is a run.
    fn skeleton(&mut self, node: &Arc<Handle>) -> Result<Option<Arc<Skeleton>>> {
        if node.kind() != Kind::Skeleton {
            return Ok(None);
        }
        if let Some((id, top)) = &self.top
            && *id == node.id()
        {
            return Ok(Some(Arc::clone(top)));
        }
        self.step(1, |readable| readable.nodes.skeleton(node).map(Some))
    }

    /// Visits a node below the one that is visited.
    fn deeper<T>(&mut self, visit: impl FnOnce(&mut Self) -> T) -> T {
        self.depth += 1;
        let found = with_stack(|| visit(self));
        self.depth -= 1;
        found
    }

    /// Bytes of keys and values in `range` of a node.
    pub(crate) fn below(&mut self, node: &Arc<Handle>, range: &KeyRange) -> Result<u64> {
        let part = (node.id(), range.clone());
        if let Some(&known) = self.known.get(&part) {
            return Ok(known);
        }
        let Some(skeleton) = self.skeleton(node)? else {
            let run = self.step(1, |readable| readable.nodes.run(node))?;
            return Ok(part_of_run(&run, range).0);
        };
        let sum = if self.depth < LOGICAL_DEPTH_MAX {
            self.deeper(|readable| readable.below_skeleton(&skeleton, range))?
        } else {
            skeleton.live_bytes_in(range)
        };
        self.known.insert(part, sum);
        Ok(sum)
    }

    fn below_skeleton(&mut self, skeleton: &Skeleton, range: &KeyRange) -> Result<u64> {
        let (mut sum, mut told) = (0u64, HashSet::new());
        let mut lo = range.lo.clone();
        // An end may have more zeros than that of the node.
        let range = range.intersect(&skeleton.range());
        if range.is_empty() {
            return Ok(0);
        }
        loop {
            let cut =
                |readable: &mut Self| cut(readable.nodes, skeleton, &lo, range.hi.clone(), None);
            let piece = match self.cut(cut) {
                Err(error) if self.limit.is_some() => {
                    self.note_estimate(&error);
                    let rest = KeyRange::new(lo, range.hi.clone());
                    return Ok(sum.saturating_add(told_once(skeleton, &rest, &mut told)));
                }
                piece => piece?,
            };
            let here = KeyRange::new(lo, piece.hi.clone());
            let base = piece.base.clone();
            let found = self.piece(skeleton, &here, (piece.base, piece.overlays, piece.reach));
            let place = (skeleton, &here, &mut told);
            sum = sum.saturating_add(self.or_estimate(found, place, (&base, &here))?);
            match piece.hi {
                Some(hi) if Some(&hi) != range.hi.as_ref() => lo = hi,
                _ => return Ok(sum),
            }
        }
    }

    /// Bytes of one piece of a node.
    fn piece(
        &mut self,
        skeleton: &Skeleton,
        here: &KeyRange,
        (base, overlays, reach): (Base, Vec<(RunView, Translation)>, Option<Bytes>),
    ) -> Result<u64> {
        let overlays = self.with_points(&overlays, here)?;
        check_falls(skeleton.height, &base)?;
        if !overlays.is_empty() {
            return self.overlaid(Frame {
                range: here.clone(),
                reach,
                base,
                overlays,
            });
        }
        let Base::Node(child, translation) = &base else {
            return Ok(0);
        };
        match whole_leaf(skeleton, here, child) {
            Some(live_bytes) => Ok(live_bytes),
            None => self.below(child, &translation.range(here)),
        }
    }

    /// The overlays that have a point in `range`. The answer is exact: so a chain of doubling clones
    /// is followed as far as there are points, and no further.
    fn with_points(
        &mut self,
        overlays: &[(RunView, Translation)],
        range: &KeyRange,
    ) -> Result<Arc<[(RunView, Translation)]>> {
        let mut found = Vec::new();
        for (run, translation) in overlays {
            let has_points = |readable: &mut Self| {
                MappedCursor::new(run, range, translation, 0).advance(readable.nodes)
            };
            if part_of_run(run, &translation.range(range)).0 > 0 && self.step(1, has_points)? {
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
        let mut merged = waiting;
        if let Base::Node(child, translation) = &frame.base {
            let range = translation.range(&frame.range);
            if frame.overlays.is_empty() {
                return self.below(child, &range);
            }
            if child.kind() == Kind::Skeleton {
                if self.depth >= LOGICAL_DEPTH_MAX {
                    return self.below(child, &range);
                }
                return self.overlaid_children(frame);
            }
            let run = self.step(1, |readable| readable.nodes.run(child))?;
            let (below, _) = part_of_run(&run, &range);
            if waiting.saturating_mul(FEW) < below {
                return Ok(below);
            }
            merged = merged.saturating_add(below);
        }
        self.step(1 + merged / STEP_BYTES, |readable| readable.merged(frame))
    }

    /// Bytes of a piece over a leaf, or over nothing, merged with its messages.
    fn merged(&self, frame: Frame) -> Result<u64> {
        let mut scan = TreeScan::of_frames(vec![frame]);
        let mut sum = 0u64;
        while scan.advance(self.prefetch)? {
            sum = sum.saturating_add((scan.key().len() + scan.value().len()) as u64);
        }
        Ok(sum)
    }

    /// The same for a piece over an interior node, which is cut into the pieces of its children.
    fn overlaid_children(&mut self, frame: Frame) -> Result<u64> {
        let Base::Node(node, translation) = frame.base.clone() else {
            return Ok(0);
        };
        let Some(skeleton) = self.skeleton(&node)? else {
            return Ok(0);
        };
        let pieces = self.step(skeleton.edges.len() as u64, |readable| {
            let mut scan = TreeScan::of_frames(Vec::new());
            scan.split(readable.prefetch, frame, &skeleton, &translation)?;
            Ok(std::mem::take(&mut scan.frames))
        })?;
        let (mut sum, mut told) = (0u64, HashSet::new());
        for piece in pieces {
            let (range, base) = (piece.range.clone(), piece.base.clone());
            let found = self.deeper(|readable| readable.overlaid(piece));
            let here = translation.range(&range);
            let place = (&*skeleton, &here, &mut told);
            sum = sum.saturating_add(self.or_estimate(found, place, (&base, &range))?);
        }
        Ok(sum)
    }
}

/// Whether the base of a piece is the child of the edge there, and no target of a GOTO.
fn is_of_edge(skeleton: &Skeleton, piece: &KeyRange, base: &Base) -> bool {
    let child = skeleton.edges[skeleton.edge_of(&piece.lo)].child.as_ref();
    matches!((child, base), (Some(child), Base::Node(node, _)) if child.node.id() == node.id())
}

/// Bytes that the edges over a piece tell. Several pieces may lie over one edge, which counts once.
fn told_once(node: &Skeleton, piece: &KeyRange, told: &mut HashSet<usize>) -> u64 {
    let first = node.edge_of(&piece.lo);
    let over = (first..node.edges.len())
        .take_while(|at| !node.edge_range(*at).intersect(piece).is_empty());
    let new = over.filter(|at| told.insert(*at));
    let children = new.filter_map(|at| node.edges[at].child.as_ref());
    children
        .map(|child| child.live_bytes)
        .fold(0, u64::saturating_add)
}

/// Bytes below the edge whose range is all of `piece`, if it leads to the leaf `child`. Interior
/// children are opened: the messages that wait in them are no part of their live bytes.
fn whole_leaf(skeleton: &Skeleton, piece: &KeyRange, child: &Arc<Handle>) -> Option<u64> {
    let at = skeleton.edge_of(&piece.lo);
    let edge = skeleton.edges[at].child.as_ref()?;
    let is_whole = skeleton.edge_range(at) == *piece && edge.node.id() == child.id();
    (is_whole && child.kind() == Kind::Leaf).then_some(edge.live_bytes)
}

/// Bytes of the points of a run in `range`, before and after compression. A block that straddles a
/// border counts half.
pub(crate) fn part_of_run(run: &RunView, range: &KeyRange) -> (u64, u64) {
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
