//! Numbers that the volume gives out once: of inodes, and salts of clones.

use std::sync::Arc;

use parking_lot::Mutex;
use ramet_betree::{Batch, Tree};
use ramet_block::failpoints::{self, Fault};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::error::Result;
use crate::format::ino::Ino;
use crate::format::keys;
use crate::namespace::transaction::RECORDS_BYTES;

/// Inode numbers that one durable reservation covers.
const RESERVE: u64 = 1 << 16;

struct InoCounter {
    /// The first number that was given out since the volume was opened.
    first: u64,
    next: u64,
    /// Numbers below this one are never given out again, even after a crash.
    reserved: u64,
}

/// Gives out inode numbers and salts.
pub(crate) struct Numbers {
    tree: Arc<Tree>,
    inos: Mutex<InoCounter>,
    random: Mutex<StdRng>,
}

impl Numbers {
    /// Numbers from `next` on. A `seed` makes the salts of a run repeatable.
    pub(crate) fn new(tree: Arc<Tree>, next: u64, seed: Option<u64>) -> Arc<Self> {
        let random = match seed {
            Some(seed) => StdRng::seed_from_u64(seed),
            None => StdRng::from_os_rng(),
        };
        Arc::new(Self {
            tree,
            inos: Mutex::new(InoCounter {
                first: next,
                next,
                reserved: next,
            }),
            random: Mutex::new(random),
        })
    }

    /// Inode numbers that were given out since the volume was opened.
    pub(crate) fn given_out(&self) -> u64 {
        let inos = self.inos.lock();
        inos.next - inos.first
    }

    /// A salt that makes every visible number below a clone new.
    pub(crate) fn new_salt(&self) -> u64 {
        self.random.lock().random::<u64>() >> 1
    }

    /// A number that no inode of the volume ever had.
    pub(crate) fn new_ino(&self) -> Result<Ino> {
        let mut inos = self.inos.lock();
        if inos.next >= inos.reserved && !failpoints::is_on(Fault::NumbersNotReserved) {
            // The reservation is a batch of its own. It enters the tree before any batch that uses
            // one of the numbers, and a crash keeps a prefix of the batches.
            let reserved = inos.next + RESERVE;
            let mut batch = Batch::new();
            batch.put(keys::counter(b"ino"), reserved.to_le_bytes().to_vec());
            self.tree.admit(RECORDS_BYTES)?;
            self.tree.apply(batch)?;
            inos.reserved = reserved;
        }
        inos.next += 1;
        Ok(Ino(inos.next - 1))
    }
}
