//! Contents of a node that no checkpoint names yet.

use std::sync::Arc;

use crate::node::buffer::MemRun;
use crate::node::handle::Place;
use crate::node::packed::PackedRun;
use crate::node::skeleton::Skeleton;
use crate::store::dirty::Handle;

#[derive(Debug)]
pub(crate) enum State {
    Skeleton(Arc<Skeleton>),
    Run(Arc<MemRun>),
    Packed(Arc<PackedRun>),
    Written {
        place: Place,
        children: Vec<Arc<Handle>>,
        /// A record of the journal names the place.
        is_named: bool,
    },
    Recorded(Option<Place>),
}

impl State {
    /// What a node that is not written yet takes of the memory for such, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let bytes = match self {
            State::Skeleton(node) => node.weight(),
            State::Run(run) => run.memory_bytes(),
            State::Packed(run) => run.memory_bytes,
            State::Written { .. } | State::Recorded(_) => 0,
        };
        bytes as u64
    }
}
