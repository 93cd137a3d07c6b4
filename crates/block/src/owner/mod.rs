//! Ownership of a volume where no lock tells: a heartbeat on the device, as ext4's multiple mount
//! protection.
//!
//! Locks keep the processes of one machine apart (`stack.rs`). A disk that two machines share, or
//! an image that two file systems show under different inodes, needs a word on the device itself.
//! Six blocks of the superblock area hold it, two of each kind, so that no bad sector takes the
//! volume:
//!
//! ```text
//!  claim    names the owner of the volume          written at opening and closing
//!  pulse    shows that the owner lives             written by the owner, while it writes
//!  intent   names an opener that wants the volume  written at opening, before the claim
//! ```
//!
//! **Opening.** A volume without an owner, or whose owner is known to have ended, is taken at once.
//! Otherwise the opener waits two intervals; a pulse that moves refuses it. To take the volume the
//! opener
//!
//! 1. writes its intent,
//! 2. reads that the claim is still the one that it judged,
//! 3. writes its claim,
//! 4. reads claim, intent and pulse.
//!
//! The volume is its own if its intent is still there and no pulse moved since the judgement
//! (Lamport's fast mutual exclusion, 1987, with a lease in place of his bound on the critical
//! section). Otherwise another opener is at the same point, or the old owner woke up. The opener
//! then waits two intervals. Each process that believed to own the volume has looked at the claim
//! by then, or will look before it writes. The opener owns the volume if the claim is still its
//! own.
//!
//! **Owning.** A look at the claim is good for one interval. The interval counts from before the
//! look, and goes on while the machine sleeps. After it, no write is handed to the device and no
//! sync is reported without a new look. A look writes the pulse first and reads the claim second,
//! so of an owner that renews and an opener that claims, at least one sees the other. An owner that
//! finds another's claim writes nothing any more. An owner that does not write does not look, and
//! costs nothing.
//!
//! The protocol cannot stop a write that was handed to the system before the look became too old,
//! and reaches the device later: the write that is under way when a machine stops, and unsynced
//! bytes in the page cache of that machine.
//!
//! All blocks are read and written past the page cache.

mod blocks;
mod claim;
mod device;
mod machine;
mod record;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::device::Device;

pub use blocks::{CLAIMS, INTENTS, INTERVAL, PULSES, inspect, is_place};
pub use claim::{ClaimError, Contents};
pub use device::OwnedDevice;
pub use machine::{Life, Machine, ThisMachine};
pub use record::{Owner, OwnerBlock, Process};

/// Takes the volume on `device` for this process, and keeps it while it writes. When its owner may
/// be alive, `note` is told so and this waits two intervals.
///
/// # Errors
/// [`ClaimError`]; `InUse` when it has another owner.
pub fn own(
    device: Arc<dyn Device>,
    contents: Contents,
    note: &mut dyn FnMut(&str),
) -> Result<OwnedDevice, ClaimError> {
    let owned = OwnedDevice::claim(device, Arc::new(ThisMachine), contents, note)?;
    owned.keep_renewed()?;
    Ok(owned)
}
