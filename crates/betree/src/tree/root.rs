//! The root: the memory buffer is frozen into it, its shape is kept, and the next root is
//! published.

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::skeleton::Skeleton;
use crate::reshape::maintain::Maintainer;
use crate::reshape::make::NodeMaker;
use crate::reshape::split::Splitter;
use crate::store::store::Store;
use crate::tree::inner::{Inner, State};

impl Inner {
    /// Makes the memory buffer the newest segment of the root.
    pub(crate) fn freeze(&self, state: &mut State) {
        if state.buffer.is_empty() {
            return;
        }
        self.poisoning(|| {
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
        let top = self.state.lock().top.clone();
        let mut root = Skeleton::clone(&top);
        let seen = root.next_ord;
        change(&self.store, &mut root)?;
        self.shape_root(&mut root, &top)?;
        self.publish(root, seen);
        Ok(())
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
            crate::counters::bump(&store.counters.collapses);
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

    /// Brings the root within its limits; with `deep` range messages go as deep as they can.
    pub(crate) fn flush(&self, deep: bool) -> Result<()> {
        // Writers go on, and no other thread that changes the structure has to wait.
        let top = self.state.lock().top.clone();
        top.segs
            .iter()
            .for_each(|seg| self.store.write_back.pack(&seg.run));
        drop(top);
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

    /// The same, as far as it goes: on a full volume, or at an unreadable node, messages stay where
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
}
