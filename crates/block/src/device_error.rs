//! A call that a device, or the system, failed.
//!
//! The kind of call decides the consequences. After a failed read the state in memory is as good as
//! before; after a failed write or sync the contents of the device are unknown.

use std::fmt;
use std::io;
use std::sync::Arc;

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Bytes are read.
    Read,
    /// Bytes are written.
    Write,
    /// Written bytes become durable.
    Sync,
    /// The contents of a range are given up.
    Discard,
    /// The device becomes longer.
    Grow,
    /// Something is taken of the system: room of the host, a random number.
    Take,
    /// A thread is started.
    Start,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Call::Read => "reading",
            Call::Write => "writing",
            Call::Sync => "syncing",
            Call::Discard => "discarding",
            Call::Grow => "growing",
            Call::Take => "taking",
            Call::Start => "starting",
        })
    }
}

/// The error of a call, with the structure that it was for.
#[derive(Clone, Debug)]
pub struct DeviceError {
    /// The kind of the call.
    pub call: Call,
    /// The structure.
    pub what: &'static str,
    /// The address of the structure, in bytes from the start of the device, if it has one.
    pub addr: Option<u64>,
    /// The error of the device.
    pub source: Arc<io::Error>,
}

impl DeviceError {
    /// The error of a `call` for `what`, which has no address.
    #[must_use]
    pub fn new(call: Call, what: &'static str, source: io::Error) -> Self {
        Self {
            call,
            what,
            addr: None,
            source: Arc::new(source),
        }
    }

    /// Turns the error of a `call` for `what` at `addr`.
    pub fn at(call: Call, what: &'static str, addr: u64) -> impl FnOnce(io::Error) -> Self {
        move |source| Self {
            addr: Some(addr),
            ..Self::new(call, what, source)
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.call, self.what)?;
        if let Some(addr) = self.addr {
            write!(f, " at byte {addr}")?;
        }
        write!(f, ": {}", self.source)
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_call_structure_and_address() {
        let source = || io::Error::other("bad sector");
        let error = DeviceError::at(Call::Read, "a node", 4096)(source());
        assert_eq!(error.to_string(), "reading a node at byte 4096: bad sector");
        let error = DeviceError::new(Call::Sync, "the journal", source());
        assert_eq!(error.to_string(), "syncing the journal: bad sector");
    }
}
