//! The end of writing on request.
//!
//! A tree that is shut down leaves its device as it is, as a process that ends without closing it
//! does. Nothing takes the place of the power cut that follows a shutdown in a test: writes that
//! are under way may still reach the device, as they may before a power cut.

use crate::tree::api::Tree;

/// Has `tree` write nothing more. Later changes and syncs fail with
/// [`Poisoned`](crate::Error::Poisoned), and [`Tree::close`] writes nothing. The next open finds the
/// state of the last sync or a later one. A window stays as it is: it writes nothing.
pub fn shut_down(tree: &Tree) {
    if tree.window.check_whole().is_ok() {
        tree.inner.failure.shut_down();
    }
}
