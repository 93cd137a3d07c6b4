//! Sources of clones, named before the call that clones them: see `ramet_fs::control`.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_fs::control::SourceReply;
use ramet_fs::{Caller, Error, Ino, Result, Volume};

/// Tokens of one user that wait to be used. A user's oldest token goes when there are more: its
/// process may have died.
const TOKENS_MAX: usize = 1024;
/// Tokens of all users.
const ALL_TOKENS_MAX: usize = 16 * TOKENS_MAX;

struct Token {
    number: u64,
    uid: u32,
    source: Source,
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
        volume.attributes().may_search(caller, dir)?;
        let source = Source::of(volume, volume.names().lookup(dir, name)?.ino);
        let token = Token {
            number: rand::random(),
            uid: caller.uid,
            source,
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
        Ok(token.source)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions, ROOT_INO};

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
}
