//! What is wanted from the threads in the background.

use std::sync::Arc;

use crate::node::handle::Handle;
use crate::tree::inner::Inner;

#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) flush: bool,
    /// A node to be put in order for the clones to come.
    pub(crate) mend: Option<Arc<Handle>>,
    pub(crate) checkpoint: bool,
    /// What is queued for the journal written out.
    pub(crate) journal: bool,
    pub(crate) stop: bool,
}

impl Inner {
    pub(crate) fn want(&self, set: impl FnOnce(&mut Wanted)) {
        set(&mut self.wanted.lock());
        self.work.notify_all();
        self.keep.notify_all();
    }
}
