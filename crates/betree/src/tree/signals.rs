//! Requests to the threads in the background.

use std::sync::Arc;

use crate::node::handle::Handle;

#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) flush: bool,
    /// A node that needs a compacted copy.
    pub(crate) compacted_copy: Option<Arc<Handle>>,
    pub(crate) checkpoint: bool,
    /// Whether the frames that are queued for the journal are to be written.
    pub(crate) journal: bool,
    pub(crate) stop: bool,
}
