//! Answers as text, with panics among them.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// An outcome with the name of the call.
pub(crate) fn told<T, E: std::fmt::Display>(what: &str, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

/// A panic of the tree is a failure like any other.
pub(crate) fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("of an unknown kind")))
    })
}
