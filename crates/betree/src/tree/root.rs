//! The root: the memory buffer is frozen into it, its shape is kept, and the next root is
//! published.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::run_view::RunView;
use crate::node::skeleton::Skeleton;
use crate::paths::StructuralPath;
use crate::read::lookup::View;
use crate::reshape::compact::Compactor;
use crate::reshape::condense::{CondenseStep, Condenser, FreshRefs};
use crate::reshape::idle::{IdleRewriter, IdleStep};
use crate::reshape::maintain::Maintainer;
use crate::reshape::make::NodeMaker;
use crate::reshape::split::Splitter;
use crate::shape::Seq;
use crate::store::fragments::Fragments;
use crate::store::store::Store;
use crate::sync::TimedMutex;
use crate::tree::failure::Failure;

/// The state under a mutex that is held for microseconds.
pub(crate) struct State {
    pub(crate) buffer: Buffer,
    /// Number of frozen buffers.
    pub(crate) frozen: u64,
    pub(crate) root: Arc<Handle>,
    /// Contents of `root`, so that freezing the buffer never reads.
    pub(crate) top: Arc<Skeleton>,
    /// Number of the last batch applied.
    pub(crate) seq: Seq,
}

impl State {
    pub(crate) fn new(store: &Store, root: Arc<Handle>, seq: Seq) -> Result<Self> {
        let top = store.nodes.skeleton(&root)?;
        store.space.set_waiting(&top);
        Ok(Self {
            buffer: Buffer::default(),
            frozen: 0,
            top,
            root,
            seq,
        })
    }

    pub(crate) fn set_root(&mut self, store: &Store, mut root: Skeleton) {
        // Keeps T3 for the frozen messages.
        root.height = root
            .segs
            .iter()
            .map(|seg| seg.goto_height)
            .fold(root.height, u32::max);
        store.space.set_waiting(&root);
        self.root = store.handles.new_skeleton(root);
        self.top = store
            .handles
            .dirty
            .skeleton(&self.root)
            .expect("a new skeleton is fresh");
    }
}

/// The root and the memory buffer over it.
///
/// `state` is held for microseconds, over memory work but for one case: a clone that found its nodes
/// gone from the cache sixteen times reads them under it (`apply.rs`).
/// `structure` is held by a thread that builds a new root. Reading, writing and freezing the buffer
/// need it not: freezing only appends to the root's segments, and [`Root::publish`] carries these
/// segments over.
pub(crate) struct Root {
    store: Arc<Store>,
    failure: Arc<Failure>,
    pub(crate) state: TimedMutex<State>,
    pub(crate) structure: TimedMutex<()>,
}

impl Root {
    pub(crate) fn new(store: Arc<Store>, failure: Arc<Failure>, state: State) -> Self {
        Self {
            store,
            failure,
            state: TimedMutex::new(state),
            structure: TimedMutex::new(()),
        }
    }

    pub(crate) fn view(&self) -> View {
        let state = self.state.lock_briefly();
        View {
            buffer: RunView::Mem(Arc::new(state.buffer.clone())),
            root: state.root.clone(),
        }
    }

    /// The contents of this root, which are in memory while it is the newest.
    pub(crate) fn top_of(&self, root: &Arc<Handle>) -> Option<Arc<Skeleton>> {
        let state = self.state.lock();
        Arc::ptr_eq(&state.root, root).then(|| state.top.clone())
    }

    /// Number of the last batch applied.
    pub(crate) fn seq(&self) -> Seq {
        self.state.lock().seq
    }

    /// Makes the memory buffer the newest segment of the root.
    pub(crate) fn freeze(&self, state: &mut State) {
        if state.buffer.is_empty() {
            return;
        }
        self.failure.poisoning(|| {
            let run = std::mem::take(&mut state.buffer);
            state.frozen += 1;
            self.store.space.set_buffered(0);
            let mut root = Skeleton::clone(&state.top);
            NodeMaker::of(&self.store).push_run(&mut root, run);
            state.set_root(&self.store, root);
        });
    }

    /// Builds a new root from the current one and publishes it. Caller holds `structure`.
    pub(crate) fn rebuild(
        &self,
        change: impl FnOnce(&Store, &mut Skeleton) -> Result<()>,
    ) -> Result<()> {
        self.rebuild_if(|store, root| change(store, root).map(|()| ((), true)))
    }

    /// The same, if `change` tells that it changed anything. Returns the rest of its answer.
    fn rebuild_if<T>(
        &self,
        change: impl FnOnce(&Store, &mut Skeleton) -> Result<(T, bool)>,
    ) -> Result<T> {
        let top = self.state.lock().top.clone();
        let mut root = Skeleton::clone(&top);
        let seen = root.next_ord;
        let (answer, has_changed) = change(&self.store, &mut root)?;
        if has_changed {
            self.shape_root(&mut root, &top)?;
            self.publish(root, seen);
        }
        Ok(answer)
    }

    /// Gives a root with too many edges a level more, and a root with a single child a level less.
    /// `before` is the root before its change.
    fn shape_root(&self, root: &mut Skeleton, before: &Skeleton) -> Result<()> {
        let store = &self.store;
        let whole = std::mem::replace(root, Skeleton::empty(1, KeyRange::all()));
        *root = Splitter::of(store).within_fanout(whole, Some(before))?;
        while let ([edge], []) = (&root.edges[..], &root.segs[..]) {
            let Some(child) = edge
                .child
                .as_ref()
                .filter(|c| c.node.height() > 0 && c.translation.is_identity())
            else {
                break;
            };
            store.counters.took(StructuralPath::Collapses);
            let next_ord = root.next_ord;
            let mut only = store.nodes.skeleton(&child.node)?.clipped(&KeyRange::all());
            // Ordinals go on from the higher of both, so that segments frozen meanwhile stay
            // newest.
            only.next_ord = only.next_ord.max(next_ord);
            *root = only;
        }
        root.height = root.label()?;
        Ok(())
    }

    fn publish(&self, root: Skeleton, seen: u64) {
        let mut state = self.state.lock();
        // Segments that were frozen while the new root was built lie over it.
        let newer = state.top.segs.partition_point(|s| s.ord < seen);
        let root = root.with_newer(&state.top.segs[newer..], seen, state.top.next_ord);
        let old = state.top.clone();
        state.set_root(&self.store, root);
        drop(state);
        // Nodes that only the old root held are dropped without the lock.
        drop(old);
    }

    /// Packs the segments of the root. Writers go on, and no other thread that changes the structure
    /// has to wait.
    fn pack_segments(&self) {
        let top = self.state.lock().top.clone();
        top.segs
            .iter()
            .for_each(|seg| self.store.write_back.pack(&seg.run));
    }

    /// Brings the root within its limits; with `deep` range messages go as deep as they can.
    pub(crate) fn flush(&self, deep: bool) -> Result<()> {
        self.pack_segments();
        let _structure = self.structure.lock();
        let store = &self.store;
        let maintain =
            || self.rebuild(|store, root| Maintainer::of(store).maintain(root, true, deep));
        if deep {
            store.space_debt.flush_or_sweep(maintain)
        } else {
            maintain()
        }
    }

    /// The same between checkpoints, for a caller that waits for the work of other threads
    /// `longest` at most. Returns whether it did.
    pub(crate) fn flush_within(&self, longest: Duration) -> Result<bool> {
        self.pack_segments();
        let Some(_structure) = self.structure.lock_within(longest) else {
            return Ok(false);
        };
        self.rebuild(|store, root| Maintainer::of(store).maintain(root, true, false))?;
        Ok(true)
    }

    /// As [`Root::flush`], as far as it goes: on a full volume, or at an unreadable node, messages stay where
    /// they are, and the messages in memory become durable all the same.
    pub(crate) fn flush_if_possible(&self, deep: bool) -> Result<()> {
        match self.flush(deep) {
            Ok(()) | Err(Error::NoSpace) => Ok(()),
            Err(error) if error.is_of_a_read() => {
                tracing::warn!(%error, "all messages stay where they are");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Writes leaves anew from the key `from` on, as far as one step goes.
    ///
    /// # Errors
    /// As [`IdleRewriter::step`]; then nothing has changed.
    pub(crate) fn rewrite_idle(&self, from: &[u8]) -> Result<IdleStep> {
        let _structure = self.structure.lock();
        self.rebuild_if(|store, root| {
            let step = IdleRewriter::of(store).step(Maintainer::of(store), root, from)?;
            let has_changed = step.has_changed;
            Ok((step, has_changed))
        })
    }

    /// Drops messages of the root that range messages of the root cover, if they are many. Returns
    /// whether it did.
    ///
    /// # Errors
    /// Those of reads and writes; then nothing has changed.
    pub(crate) fn drop_covered(&self) -> Result<bool> {
        let _structure = self.structure.lock();
        self.rebuild_if(|store, root| {
            let has_changed = Compactor::of(store).merge_covered(root)?;
            Ok((has_changed, has_changed))
        })
    }

    /// Condenses ranges from the key `from` on, as far as one step goes.
    ///
    /// # Errors
    /// As [`Condenser::step`]; then nothing has changed.
    pub(crate) fn condense(&self, from: &[u8], fresh_refs: &FreshRefs) -> Result<CondenseStep> {
        let _structure = self.structure.lock();
        self.rebuild_if(|store, root| {
            let step = Condenser::of(store, fresh_refs).step(Maintainer::of(store), root, from)?;
            let has_changed = step.has_changed;
            Ok((step, has_changed))
        })
    }

    /// Moves all messages that wait above the lowest node that covers `range` down to that node.
    pub(crate) fn sink(&self, range: &KeyRange) -> Result<()> {
        let _structure = self.structure.lock();
        self.freeze(&mut self.state.lock());
        self.rebuild(|store, root| Maintainer::of(store).sink(root, range, true))
    }

    /// Drops the segments that were written in fragments, with the contents of the root that still
    /// refer to them.
    pub(crate) fn refer_to(&self, fragments: &Fragments, root: &Arc<Handle>) -> Result<()> {
        let written = self.store.nodes.skeleton(root)?;
        let mut state = self.state.lock();
        let old = state.top.clone();
        if Arc::ptr_eq(&state.root, root) {
            state.top = written;
        } else if let Some(top) = state.top.with_fragments(fragments) {
            state.set_root(&self.store, top);
        }
        drop(state);
        drop(old);
        Ok(())
    }

    /// Bytes of the keys and values in a range that have reached leaves, an estimate: each clone
    /// counts in full. It goes down to the two leaves in which the range begins and ends, and
    /// counts those whole.
    pub(crate) fn live_bytes(&self, range: &KeyRange) -> u64 {
        let top = self.state.lock().top.clone();
        let mut sum = 0u64;
        let mut todo = vec![(top, range.clone())];
        while let Some((node, range)) = todo.pop() {
            for at in 0..node.edges.len() {
                let whole = node.edge_range(at);
                let inside = whole.intersect(&range);
                let Some(child) = node.edges[at].child.as_ref().filter(|_| !inside.is_empty())
                else {
                    continue;
                };
                let is_cut = inside != whole && child.node.height() > 0;
                // An unreadable node counts whole.
                let below = is_cut
                    .then(|| self.store.nodes.skeleton(&child.node).ok())
                    .flatten();
                match below {
                    Some(below) => todo.push((below, child.translation.range(&inside))),
                    None => sum = sum.saturating_add(child.live_bytes),
                }
            }
        }
        sum
    }
}

/// The root of an empty tree.
pub(crate) fn empty_root(store: &Store) -> Arc<Handle> {
    store
        .handles
        .new_skeleton(Skeleton::empty(1, KeyRange::all()))
}
