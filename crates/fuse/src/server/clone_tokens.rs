//! Objects that a call names beside its directory, named before that call: see
//! `ramet_fs::control`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::control::SourceReply;
use ramet_fs::{Caller, Error, Ino, ROOT_INO, Result, Volume};

/// Tokens of one user that wait to be used. A user's oldest token goes when there are more: its
/// process may have died.
const TOKENS_MAX: usize = 1024;
/// How long a token waits to be used: it keeps its object, and so the space of a file that is
/// removed meanwhile. It goes with the next call about a source after that.
const UNUSED: Duration = Duration::from_secs(60);
/// Tokens of all users.
const ALL_TOKENS_MAX: usize = 16 * TOKENS_MAX;

struct Token {
    number: u64,
    uid: u32,
    source: Source,
    since: Instant,
}

/// An inode that stays known to the volume as long as this lives.
pub(crate) struct Source {
    volume: Arc<Volume>,
    pub(crate) ino: Ino,
}

impl Source {
    /// An inode to which the server has one more reference, by a lookup.
    pub(crate) fn of(volume: &Arc<Volume>, ino: Ino) -> Self {
        let volume = Arc::clone(volume);
        Self { volume, ino }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.volume.forget(self.ino, 1);
    }
}

/// The tokens of one mount.
#[derive(Default)]
pub(crate) struct CloneTokens(Mutex<VecDeque<Token>>);

impl CloneTokens {
    /// Issues a token for `name` in `dir`, good for one use by the same user, and answers it with
    /// the number of its inode.
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
        let now = Instant::now();
        self.drop_old(now);
        let token = Token {
            number: rand::random(),
            uid: caller.uid,
            source: look(volume, caller, dir, name)?,
            since: now,
        };
        let reply = SourceReply {
            token: token.number,
            ino: token.source.ino.0,
        };
        let mut waiting = self.0.lock();
        let of_user = || {
            waiting
                .iter()
                .enumerate()
                .filter(|(_, t)| t.uid == caller.uid)
        };
        let old = if of_user().count() >= TOKENS_MAX {
            of_user().next().map(|(at, _)| at)
        } else {
            (waiting.len() >= ALL_TOKENS_MAX).then_some(0)
        };
        let oldest = old.and_then(|at| waiting.remove(at));
        waiting.push_back(token);
        drop(waiting);
        drop(oldest);
        Ok(reply)
    }

    /// Takes a token back, and answers its source.
    ///
    /// # Errors
    /// `Stale` when there is no token of this number, or another user has it.
    pub(crate) fn redeem(&self, caller: &Caller, number: u64) -> Result<Source> {
        let mut waiting = self.0.lock();
        let found = waiting
            .iter()
            .position(|token| token.number == number && token.uid == caller.uid);
        let token = found
            .and_then(|at| waiting.remove(at))
            .ok_or(Error::Stale)?;
        drop(waiting);
        self.drop_old(Instant::now());
        Ok(token.source)
    }

    /// Takes a token of the root of the volume back. A caller that has it may name objects by their
    /// paths from there: no bind mount and no chroot keeps it out.
    ///
    /// # Errors
    /// Those of [`CloneTokens::redeem`]; `NotPermitted` for a token of another object.
    pub(crate) fn redeem_root(&self, caller: &Caller, number: u64) -> Result<()> {
        match self.redeem(caller, number)?.ino {
            ROOT_INO => Ok(()),
            _ => Err(Error::NotPermitted),
        }
    }

    /// Drops the tokens that have waited for too long.
    pub(crate) fn drop_old(&self, now: Instant) {
        let is_old = |token: &Token| now.saturating_duration_since(token.since) >= UNUSED;
        let mut old = Vec::new();
        {
            let mut waiting = self.0.lock();
            // The oldest comes first.
            while waiting.front().is_some_and(is_old) {
                old.extend(waiting.pop_front());
            }
        }
        // An inode that nobody else knows goes without the lock.
        drop(old);
    }
}

/// The object `name` in `dir`.
///
/// # Errors
/// `Access` when the caller may not search `dir`, `NotFound`.
pub(crate) fn look(volume: &Arc<Volume>, caller: &Caller, dir: Ino, name: &[u8]) -> Result<Source> {
    volume.attributes().may_search(caller, dir)?;
    Ok(Source::of(volume, volume.names().lookup(dir, name)?.ino))
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, Kind, NewInode, OpenOptions};

    use super::*;

    fn user(uid: u32) -> Caller {
        Caller::user(uid, uid)
    }

    #[test]
    fn token_serves_its_user_until_many_newer_ones_of_the_same_wait() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let tokens = CloneTokens::default();
        let issue = |caller: &Caller| {
            let reply = tokens.issue(&volume, caller, ROOT_INO, b".").unwrap();
            assert_eq!(reply.ino, ROOT_INO.0);
            reply.token
        };
        let first = issue(&user(7));
        assert!(matches!(tokens.redeem(&user(8), first), Err(Error::Stale)));
        assert_eq!(tokens.redeem(&user(7), first).unwrap().ino, ROOT_INO);
        let others = issue(&user(7));
        let old = issue(&user(8));
        for _ in 0..TOKENS_MAX {
            issue(&user(8));
        }
        assert!(matches!(tokens.redeem(&user(8), old), Err(Error::Stale)));
        assert!(tokens.redeem(&user(7), others).is_ok());
    }

    #[test]
    fn token_of_another_directory_names_no_root() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let new = NewInode::new(Kind::Directory, 0o755);
        let dir = volume.names().create(ROOT_INO, b"dir", &new).unwrap().ino;
        let tokens = CloneTokens::default();
        let issue = |dir, name: &[u8]| tokens.issue(&volume, &user(7), dir, name).unwrap().token;
        for (dir, name) in [(ROOT_INO, &b"dir"[..]), (dir, b".")] {
            let refused = tokens.redeem_root(&user(7), issue(dir, name));
            assert!(matches!(refused, Err(Error::NotPermitted)));
        }
        let root = issue(ROOT_INO, b".");
        let of_other = tokens.redeem_root(&user(8), root);
        assert!(matches!(of_other, Err(Error::Stale)));
        tokens.redeem_root(&user(7), root).unwrap();
        assert!(matches!(tokens.redeem_root(&user(7), 0), Err(Error::Stale)));
    }

    #[test]
    fn a_token_that_is_not_used_lets_its_object_go() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let (tokens, begun) = (CloneTokens::default(), Instant::now());
        let reply = tokens.issue(&volume, &user(7), ROOT_INO, b".").unwrap();
        tokens.drop_old(begun + UNUSED / 2);
        assert_eq!(tokens.0.lock().len(), 1);
        tokens.drop_old(Instant::now() + UNUSED);
        assert_eq!(tokens.0.lock().len(), 0);
        let used = tokens.redeem(&user(7), reply.token);
        assert!(matches!(used, Err(Error::Stale)));
        // A call that waited for its turn still finds its source.
        let late = tokens.issue(&volume, &user(7), ROOT_INO, b".").unwrap();
        tokens.0.lock()[0].since = begun.checked_sub(2 * UNUSED).unwrap_or(begun);
        assert!(tokens.redeem(&user(7), late.token).is_ok());
    }
}
