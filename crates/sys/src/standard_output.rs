//! Whether standard output was open when the process began.
//!
//! Before `main`, Rust opens `/dev/null` in the place of each standard stream that is closed, so
//! that no other file gets its number. Results that are written there are lost without an error, and
//! so are those for a stream that is open for reading only. A function that the loader calls before
//! that remembers the state.

use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether standard output was closed when the process began, or open for reading only.
pub fn was_stdout_closed() -> bool {
    WAS_CLOSED.load(Ordering::Relaxed)
}

extern "C" fn look_at_stdout() {
    // SAFETY: the call takes no pointer, and asks for flags of a descriptor, open or not.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let is_closed = flags == -1 || flags & libc::O_ACCMODE == libc::O_RDONLY;
    WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

/// The loader calls the functions in this section, before `main` and in its thread.
// SAFETY: the section takes pointers to functions in the convention of C. This one needs neither
// arguments nor the runtime of Rust, and does not unwind.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = look_at_stdout;
