//! Taking a volume: judge the owner, wait if need be, and claim.

use std::io;
use std::time::Duration;

use crate::SuperblockError;
use crate::device::Device;
use crate::superblock::{are_copies_outdated, read_superblock};

use super::blocks::{
    CLAIMS, INTENTS, Marks, PULSES, Seen, Standing, standing, write_both, write_one,
};
use super::machine::{Life, Machine};
use super::record::{Owner, OwnerBlock};

/// How long an opener waits for a pulse to move.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How often an opener looks while it waits.
const POLL: Duration = Duration::from_millis(500);

/// Why a volume cannot be owned.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It has another owner.
    #[error("in use by {0}")]
    InUse(String),
    /// There is no volume.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The owner blocks cannot be written.
    #[error("the owner of the volume cannot be written: {0}")]
    Io(#[from] io::Error),
}

/// Contents of the device that is to be owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// A volume; nothing is written where there is none.
    Volume,
    /// Anything, over which a volume is going to be made.
    Anything,
}

/// An opening that wants a volume.
pub(super) struct Claimant<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) machine: &'a dyn Machine,
    pub(super) me: &'a Owner,
    pub(super) contents: Contents,
}

/// The owner blocks before they are changed.
struct Judged {
    marks: Marks,
    /// Why the volume may have an owner.
    doubt: Option<String>,
}

impl Claimant<'_> {
    /// Takes the volume, and returns from when on the claim was seen. `note` is told the reason
    /// before a wait.
    pub(super) fn take(&self, note: &mut dyn FnMut(&str)) -> Result<Duration, ClaimError> {
        if self.contents == Contents::Volume {
            match read_superblock(self.device) {
                // A repair may go back to the one that is left.
                Ok(_) | Err(SuperblockError::NewestLost { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut judged = self.judge();
        let is_waiting = judged.doubt.is_some();
        if let Some(doubt) = &judged.doubt {
            let secs = PATIENCE.as_secs();
            note(&format!(
                "{doubt}; waiting {secs} seconds for a sign of life"
            ));
            judged.marks = self.wait(judged.marks)?;
        }
        let since = self.claim(&judged.marks)?;
        // Another machine may have written the blocks that were read here before. One that closed
        // the volume has written a superblock.
        if is_waiting || are_copies_outdated(self.device) {
            self.device.forget_read(0, self.device.len_bytes());
        }
        Ok(since)
    }

    fn judge(&self) -> Judged {
        let marks = Marks::read(self.device);
        let doubt = marks.claims.iter().find_map(|seen| self.doubt(seen));
        Judged { marks, doubt }
    }

    /// Why this claim may be that of an owner, if it may.
    fn doubt(&self, seen: &Seen) -> Option<String> {
        let Some(bytes) = seen else {
            return Some("its owner block cannot be read".into());
        };
        match OwnerBlock::decode(bytes) {
            Ok(OwnerBlock::Free) => None,
            Ok(OwnerBlock::Claim(owner)) => match self.machine.life(&owner) {
                Life::Dead => None,
                Life::Unknown => Some(format!(
                    "its owner is {owner}, which is not known to have ended"
                )),
            },
            // Bytes from before the volume is made have no meaning.
            _ if self.contents == Contents::Anything => None,
            Ok(_) => Some("its owner block holds no claim".into()),
            Err(detail) => Some(format!("its owner block is damaged ({detail})")),
        }
    }

    /// Waits until the owner closes the volume, or has shown no sign of life for long enough.
    fn wait(&self, before: Marks) -> Result<Marks, ClaimError> {
        let end = self.machine.now() + PATIENCE;
        loop {
            self.machine.sleep(POLL);
            let is_over = self.machine.now() >= end;
            let marks = Marks::read(self.device);
            if marks.claims != before.claims {
                let closed = marks.claims.iter().all(|seen| self.doubt(seen).is_none());
                return match closed {
                    true => Ok(marks),
                    false => Err(self.in_use(&marks)),
                };
            }
            if marks.pulses != before.pulses {
                return Err(self.in_use(&marks));
            }
            if is_over {
                return Ok(marks);
            }
        }
    }

    /// Claims a volume whose owner blocks were found to be `before`, and judged to be nobody's.
    fn claim(&self, before: &Marks) -> Result<Duration, ClaimError> {
        let intent = OwnerBlock::Intent(self.me.clone()).encode();
        let place = write_one(self.device, INTENTS, &intent);
        let found = Marks::read(self.device);
        if found.claims != before.claims {
            return Err(self.in_use(&found));
        }
        let since = self.machine.now();
        let claim = OwnerBlock::Claim(self.me.clone()).encode();
        write_both(self.device, CLAIMS, &claim)?;
        let after = Marks::read(self.device);
        self.require_mine(&after)?;
        let intent_stands = place.is_ok_and(|place| {
            after.intents[place].as_deref() == Some(&intent[..])
                && after.intents[1 - place] == before.intents[1 - place]
        });
        // A pulse that cannot be read may have moved.
        let is_quiet = after.pulses == before.pulses && after.pulses.iter().all(Option::is_some);
        let since = if intent_stands && is_quiet {
            since
        } else {
            self.machine.sleep(PATIENCE);
            let since = self.machine.now();
            self.require_mine(&Marks::read(self.device))?;
            since
        };
        self.mend(&after);
        Ok(since)
    }

    fn require_mine(&self, marks: &Marks) -> Result<(), ClaimError> {
        match standing(&marks.claims, self.me) {
            Standing::Mine => Ok(()),
            Standing::Others(owner) => Err(ClaimError::InUse(owner.to_string())),
            Standing::Nobodys => {
                let lost = std::io::Error::other("the claim does not read back");
                Err(lost.into())
            }
        }
    }

    /// Writes pulses and intents anew that cannot be read, make no sense, or were never written: an
    /// image then has the room for them, also when its host is full later. Best effort: no owner
    /// needs both of a kind.
    fn mend(&self, marks: &Marks) {
        let pulses = marks.pulses.iter().zip(PULSES);
        for (seen, addr) in marks.intents.iter().zip(INTENTS).chain(pulses) {
            let is_good = |bytes: &Vec<u8>| {
                OwnerBlock::decode(bytes).is_ok() && bytes.iter().any(|byte| *byte != 0)
            };
            if !seen.as_ref().is_some_and(is_good) {
                let _ = self.device.write_through(addr, &OwnerBlock::Free.encode());
            }
        }
    }

    /// The refusal that names the owner in the claims, or in the pulses.
    fn in_use(&self, marks: &Marks) -> ClaimError {
        let named = marks.claims.iter().chain(&marks.pulses).flatten();
        let owner = named.filter_map(|bytes| match OwnerBlock::decode(bytes) {
            Ok(OwnerBlock::Claim(owner) | OwnerBlock::Pulse(owner, _)) => Some(owner),
            _ => None,
        });
        let other = owner.into_iter().find(|owner| owner.id != self.me.id);
        ClaimError::InUse(other.map_or_else(|| "another machine".into(), |o| o.to_string()))
    }
}
