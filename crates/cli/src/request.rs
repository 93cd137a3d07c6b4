//! Calls of the daemon whose request and reply are JSON.

use std::os::fd::OwnedFd;

use ramet_fs::control::{decode_stat_reply, encode_stat_reply};
use ramet_sys::control_ioctl;
use rustix::io::{Errno, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::errno_of;

/// Sends a request by the control call `number` on a file of the mount.
///
/// # Errors
/// Those of the call; `TOOBIG` for a request that has no room in a call, `PROTO` for a reply of
/// another form.
pub fn ask<R: DeserializeOwned>(
    file: &OwnedFd,
    number: u32,
    request: &impl Serialize,
) -> Result<R> {
    let bytes = call(file, number, request)?;
    let text = decode_stat_reply(&bytes).map_err(|_| Errno::PROTO)?;
    serde_json::from_str(text).map_err(|_| Errno::PROTO)
}

/// The same, for a reply of any form: its bytes.
///
/// # Errors
/// Those of the call; `TOOBIG` for a request that has no room in a call.
pub fn call(file: &OwnedFd, number: u32, request: &impl Serialize) -> Result<Vec<u8>> {
    let text = serde_json::to_string(request).map_err(|_| Errno::INVAL)?;
    let mut bytes = encode_stat_reply(&text).map_err(|_| Errno::TOOBIG)?;
    control_ioctl(file, number, &mut bytes).map_err(errno_of)?;
    Ok(bytes)
}
