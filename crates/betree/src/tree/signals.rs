//! What is wanted from the threads in the background.

use std::sync::Arc;

use crate::node::handle::Handle;

#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) flush: bool,
    /// A node to be put in order for the clones to come.
    pub(crate) compacted_copy: Option<Arc<Handle>>,
    pub(crate) checkpoint: bool,
    /// What is queued for the journal written out.
    pub(crate) journal: bool,
    pub(crate) stop: bool,
}
