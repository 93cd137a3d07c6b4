//! Sources of clones, named before the call that clones them: see `ramet_fs::control`.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_fs::control::SourceReply;
use ramet_fs::{Caller, Error, Ino, Result, Volume};

/// CloneTokens of one user that wait to be used; callers that died in between lose theirs to newer ones of the same user.
const TICKETS_MAX: usize = 1024;
/// CloneTokens of all users.
const ALL_TICKETS_MAX: usize = 16 * TICKETS_MAX;

struct Ticket {
    number: u64,
    uid: u32,
    source: Source,
}

/// An object that stays known as long as this lives.
pub(crate) struct Source {
    volume: Arc<Volume>,
    pub(crate) ino: Ino,
}

impl Drop for Source {
    fn drop(&mut self) {
        self.volume.forget(self.ino, 1);
    }
}

/// The tickets of one mount.
#[derive(Default)]
pub(crate) struct CloneTokens(Mutex<VecDeque<Ticket>>);

impl CloneTokens {
    /// A ticket for `name` in `dir`, good for one use by the same user, and the number of the inode that it stands for.
    ///
    /// # Errors
    /// `Access` when the caller may not search `dir`, `NotFound`.
    pub(crate) fn issue(
        &self,
        volume: &Arc<Volume>,
        caller: &Caller,
        dir: Ino,
        name: &[u8],
    ) -> Result<SourceReply> {
        volume.may_search(caller, dir)?;
        let source = Source {
            ino: volume.lookup(dir, name)?.ino,
            volume: Arc::clone(volume),
        };
        let ticket = Ticket {
            number: rand::random(),
            uid: caller.uid,
            source,
        };
        let reply = SourceReply {
            ticket: ticket.number,
            ino: ticket.source.ino.0,
        };
        let mut held = self.0.lock();
        let of_user = || held.iter().enumerate().filter(|(_, t)| t.uid == caller.uid);
        let old = if of_user().count() >= TICKETS_MAX {
            of_user().next().map(|(at, _)| at)
        } else {
            (held.len() >= ALL_TICKETS_MAX).then_some(0)
        };
        let oldest = old.and_then(|at| held.remove(at));
        held.push_back(ticket);
        drop(held);
        drop(oldest);
        Ok(reply)
    }

    /// Takes a ticket back.
    ///
    /// # Errors
    /// `Stale` when it is not one, or another user's.
    pub(crate) fn redeem(&self, caller: &Caller, number: u64) -> Result<Source> {
        let mut held = self.0.lock();
        let found = held
            .iter()
            .position(|ticket| ticket.number == number && ticket.uid == caller.uid);
        let ticket = found.and_then(|at| held.remove(at)).ok_or(Error::Stale)?;
        Ok(ticket.source)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions, ROOT_INO};

    use super::*;

    fn user(uid: u32) -> Caller {
        Caller {
            uid,
            gid: uid,
            groups: Vec::new(),
        }
    }

    #[test]
    fn a_ticket_serves_its_user_until_many_newer_ones_of_the_same_wait() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let tickets = CloneTokens::default();
        let issue = |caller: &Caller| {
            let reply = tickets.issue(&volume, caller, ROOT_INO, b".").unwrap();
            assert_eq!(reply.ino, ROOT_INO.0);
            reply.ticket
        };
        let first = issue(&user(7));
        assert!(matches!(tickets.redeem(&user(8), first), Err(Error::Stale)));
        assert_eq!(tickets.redeem(&user(7), first).unwrap().ino, ROOT_INO);
        let others = issue(&user(7));
        let old = issue(&user(8));
        for _ in 0..TICKETS_MAX {
            issue(&user(8));
        }
        assert!(matches!(tickets.redeem(&user(8), old), Err(Error::Stale)));
        assert!(tickets.redeem(&user(7), others).is_ok());
    }
}
