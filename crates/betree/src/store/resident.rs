//! Resident scopes: work that looks only at nodes in memory.
//!
//! A thread that holds locks which readers or other writers need must not wait for the device. It
//! does its work in a *resident scope*: the node cache then answers a miss with
//! [`Error::NotResident`] instead of a read, and does not wait for the reads of other threads. The
//! thread lets its locks go, reads the nodes without them, and tries again.
//!
//! The scope is a flag of the thread, so that no function between the lock and the cache has to
//! hand it on. It ends with the call, also when that panics.

use std::cell::Cell;

use crate::error::{Error, Result};
use crate::sync::thread_local;

thread_local! {
    static IS_RESIDENT: Cell<bool> = const { Cell::new(false) };
}

/// Restores the flag.
struct Scope(bool);

impl Drop for Scope {
    fn drop(&mut self) {
        IS_RESIDENT.with(|flag| flag.set(self.0));
    }
}

/// Runs `work` without reads of nodes if `is_resident`, else as it is.
pub(crate) fn resident_if<T>(is_resident: bool, work: impl FnOnce() -> T) -> T {
    let before = IS_RESIDENT.with(|flag| flag.replace(is_resident || flag.get()));
    let _scope = Scope(before);
    work()
}

/// Whether the thread may read nodes from the device.
pub(crate) fn may_read() -> bool {
    !IS_RESIDENT.with(Cell::get)
}

/// Checks that the thread may read nodes from the device.
pub(crate) fn check_may_read() -> Result<()> {
    if may_read() {
        Ok(())
    } else {
        Err(Error::NotResident)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_scope_ends_with_its_call_and_scopes_nest() {
        assert!(may_read());
        resident_if(true, || {
            assert!(!may_read());
            resident_if(false, || assert!(!may_read(), "the outer one goes on"));
            assert!(!may_read());
        });
        resident_if(false, || assert!(may_read()));
        let panicked = std::panic::catch_unwind(|| resident_if(true, || panic!("within")));
        assert!(panicked.is_err() && may_read());
    }
}
