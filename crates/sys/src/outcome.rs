//! The result of a call of the C library.

use std::io;

use libc::c_long;

/// The answer of a call, unless it is negative: the call has failed then, for the reason in `errno`.
pub fn outcome(answer: impl Into<c_long>) -> io::Result<c_long> {
    let answer = answer.into();
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer)
}
