//! The owner blocks on the device: their places, and how they are read and written.

use std::io;
use std::time::Duration;

use crate::BLOCK_BYTES;
use crate::device::Device;
use crate::superblock::{AREA_END, SLOTS};

use super::record::{Owner, OwnerBlock};

/// How long a look at the claim is good for.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// Addresses of the two claims, in bytes. Each owner block follows a copy of a superblock.
pub const CLAIMS: [u64; 2] = [SLOTS[0][0] + BLOCK_BYTES, SLOTS[1][0] + BLOCK_BYTES];
/// Addresses of the two intents.
pub const INTENTS: [u64; 2] = [SLOTS[1][1] + BLOCK_BYTES, SLOTS[0][1] + BLOCK_BYTES];
/// Addresses of the two pulses.
pub const PULSES: [u64; 2] = [CLAIMS[0] + BLOCK_BYTES, CLAIMS[1] + BLOCK_BYTES];

const _: () = assert!(PULSES[1] < AREA_END && INTENTS[1] < AREA_END);

/// Whether an owner block lies at this address.
#[must_use]
pub fn is_place(addr: u64) -> bool {
    [CLAIMS, INTENTS, PULSES]
        .into_iter()
        .flatten()
        .any(|place| place == addr)
}

/// The bytes of one block; `None` when it cannot be read.
pub(super) type Seen = Option<Vec<u8>>;

pub(super) fn read(device: &dyn Device, addr: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    device.read_fresh(addr, &mut bytes)?;
    Ok(bytes)
}

/// Writes a block at the first of two places, at the second when that fails; which it was.
pub(super) fn write_one(device: &dyn Device, places: [u64; 2], bytes: &[u8]) -> io::Result<usize> {
    match device.write_through(places[0], bytes) {
        Ok(()) => Ok(0),
        Err(_) => device.write_through(places[1], bytes).map(|()| 1),
    }
}

/// Writes a block at both of two places, of which one suffices.
pub(super) fn write_both(device: &dyn Device, places: [u64; 2], bytes: &[u8]) -> io::Result<()> {
    let done = places.map(|addr| device.write_through(addr, bytes));
    match done {
        [Err(error), Err(_)] => Err(error),
        _ => Ok(()),
    }
}

/// The owner blocks at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) claims: [Seen; 2],
    pub(super) intents: [Seen; 2],
    pub(super) pulses: [Seen; 2],
}

impl Marks {
    /// Claims first: an owner writes its pulse before it looks at them.
    pub(super) fn read(device: &dyn Device) -> Self {
        let seen = |places: [u64; 2]| places.map(|addr| read(device, addr).ok());
        Self {
            claims: seen(CLAIMS),
            intents: seen(INTENTS),
            pulses: seen(PULSES),
        }
    }
}

/// Meaning of the claims for one opening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its own claim is there, and no other.
    Mine,
    /// The claim of this other opening is there.
    Others(Owner),
    /// No claim is there.
    Nobodys,
}

pub(super) fn standing(claims: &[Seen; 2], me: &Owner) -> Standing {
    let mut found = Standing::Nobodys;
    for seen in claims.iter().flatten() {
        match OwnerBlock::decode(seen) {
            Ok(OwnerBlock::Claim(owner)) if owner.id != me.id => return Standing::Others(owner),
            Ok(OwnerBlock::Claim(_)) => found = Standing::Mine,
            _ => {}
        }
    }
    found
}

/// The owner that the claims name, if there is one, and the faults of owner blocks, with their
/// addresses. Writes nothing, and waits for nobody.
pub fn inspect(device: &dyn Device) -> (Option<Owner>, Vec<(u64, String)>) {
    let (mut owner, mut wrong) = (None, Vec::new());
    for addr in [CLAIMS, INTENTS, PULSES].into_iter().flatten() {
        let found = read(device, addr).map_err(|error| error.to_string());
        let place = if CLAIMS.contains(&addr) {
            "claim"
        } else if INTENTS.contains(&addr) {
            "intent"
        } else {
            "pulse"
        };
        match found.and_then(|bytes| OwnerBlock::decode(&bytes)) {
            Ok(OwnerBlock::Free) => {}
            Ok(OwnerBlock::Claim(found)) if place == "claim" => owner = Some(found),
            Ok(OwnerBlock::Intent(_)) if place == "intent" => {}
            Ok(OwnerBlock::Pulse(..)) if place == "pulse" => {}
            Ok(_) => wrong.push((addr, format!("no {place}"))),
            Err(detail) => wrong.push((addr, format!("{place}: {detail}"))),
        }
    }
    (owner, wrong)
}
