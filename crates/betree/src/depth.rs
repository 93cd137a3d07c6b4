//! Recursion along paths of nodes.
//!
//! A path crosses a node more for each copy that it names, and a path of a file system may name
//! thousands of copies, each inside of the one before. So functions that call themselves for the
//! node below get a new piece of stack when theirs is nearly used up, and stop at [`DEPTH_MAX`].

/// Most nodes on a path that a recursion follows.
pub(crate) const DEPTH_MAX: usize = 4096;

/// Stack that is left when a call gets a new piece, and the size of that, in bytes.
const LEFT_BYTES: usize = 256 << 10;
const PIECE_BYTES: usize = 2 << 20;

/// Calls `visit`, with enough stack for it.
pub(crate) fn with_stack<T>(visit: impl FnOnce() -> T) -> T {
    stacker::maybe_grow(LEFT_BYTES, PIECE_BYTES, visit)
}
