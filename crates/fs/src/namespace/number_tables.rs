//! The stored tables of inode numbers: their values, and how they are read and changed.

use bytes::Bytes;
use ramet_betree::{Batch, Tree};

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys::{self, NumberKey};
use crate::format::record::Pin;
use crate::format::slots::{Block, RUN_LENS, Run, Slot};

fn join<const N: usize>(numbers: [u64; N]) -> Bytes {
    numbers.map(u64::to_le_bytes).concat().into()
}

fn split<const N: usize>(value: &[u8]) -> Result<[u64; N]> {
    if value.len() != 8 * N {
        return Err(Error::Corrupt {
            what: "table of inode numbers",
            detail: format!("{} bytes", value.len()),
        });
    }
    let mut all = [0; N];
    for (number, bytes) in all.iter_mut().zip(value.chunks_exact(8)) {
        *number = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    Ok(all)
}

/// A counter of the volume.
///
/// # Errors
/// `Corrupt` when it is missing, and those of the tree.
pub(crate) fn counter(tree: &Tree, name: &[u8], what: &'static str) -> Result<u64> {
    let corrupt = |detail| Error::Corrupt { what, detail };
    let value = tree.get(&keys::counter(name))?;
    let value = value.ok_or_else(|| corrupt("missing".to_owned()))?;
    let bytes = value[..].try_into();
    let bytes = bytes.map_err(|_| corrupt(format!("{} bytes", value.len())))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Reads the value of a block of a run, with its marks. All are set in a value without any.
///
/// # Errors
/// `Corrupt` for another length, marks of slots that the run does not have, and bytes for marks that
/// are all set.
pub(crate) fn read_block(run: Run, value: &[u8]) -> Result<(Block, u64)> {
    if value.len() == 16 {
        let [base, generation] = split(value)?;
        return Ok((Block { base, generation }, run.marks()));
    }
    let [base, generation, marks] = split(value)?;
    if marks & !run.marks() != 0 || marks == run.marks() {
        return Err(Error::Corrupt {
            what: "table of inode numbers",
            detail: format!("marks {marks:#x} of run {}", run.0),
        });
    }
    Ok((Block { base, generation }, marks))
}

/// Reads the value of the owner of a block.
pub(crate) fn read_owner(value: &[u8]) -> Result<(Identity, Run)> {
    let [ino, generation, run] = split(value)?;
    let dir = Identity {
        ino: Ino(ino),
        generation,
    };
    Ok((dir, Run(run)))
}

/// Reads the value of the place of a pinned number.
pub(crate) fn read_place(value: &[u8]) -> Result<(Identity, Slot)> {
    let (dir, Run(slot)) = read_owner(value)?;
    Ok((dir, Slot(slot)))
}

/// Puts the block of a run, and its way back.
pub(crate) fn put_block(batch: &mut Batch, (dir, run): (Identity, Run), block: Block) {
    let value = join([block.base, block.generation]);
    batch.put(NumberKey::Block(dir, run).encode(), value);
    let owner = join([dir.ino.0, dir.generation, run.0]);
    batch.put(NumberKey::Owner(block.base).encode(), owner);
}

/// Puts the marks of a block of a run that has it.
pub(crate) fn put_marks(batch: &mut Batch, (dir, run): (Identity, Run), block: Block, marks: u64) {
    let value = match marks == run.marks() {
        true => join([block.base, block.generation]),
        false => join([block.base, block.generation, marks]),
    };
    batch.put(NumberKey::Block(dir, run).encode(), value);
}

/// Frees a block that no run has any more.
pub(crate) fn free_block(batch: &mut Batch, run: Run, base: u64) {
    batch.delete(NumberKey::Owner(base).encode());
    batch.put(free_key(run.class(), base), "");
}

/// Key of a free block.
pub(crate) fn free_key(class: usize, base: u64) -> Bytes {
    let class = u8::try_from(class).expect("there are four");
    NumberKey::Free(class, base).encode()
}

/// Puts a pin of the inode that takes `slot` of the pin's home.
pub(crate) fn put_pin(batch: &mut Batch, pin: Pin, slot: Slot) {
    let place = join([pin.home.ino.0, pin.home.generation, slot.0]);
    let ino = pin.identity.ino;
    batch.put(NumberKey::Pinned(ino).encode(), place);
    batch.put(NumberKey::PinOf(pin.home, ino).encode(), "");
}

/// The pinned inode leaves the pin's home.
pub(crate) fn leave_pin(batch: &mut Batch, pin: Pin) {
    batch.delete(NumberKey::PinOf(pin.home, pin.identity.ino).encode());
}

/// The inode that was pinned to this number is gone. Its pin goes with the reclaim.
pub(crate) fn put_unpinned(batch: &mut Batch, ino: Ino) {
    batch.put(NumberKey::Unpinned(ino).encode(), "");
}

/// Deletes a pin.
pub(crate) fn drop_pin(batch: &mut Batch, home: Identity, ino: Ino) {
    batch.delete(NumberKey::PinOf(home, ino).encode());
    batch.delete(NumberKey::Pinned(ino).encode());
}

/// The stored block of a run of a directory.
pub(crate) fn stored_block(tree: &Tree, dir: Identity, run: Run) -> Result<Option<Block>> {
    block_by(&|key| tree.get(key), dir, run)
}

/// The stored block of a run of a directory, with its marks.
pub(crate) fn stored_marks(tree: &Tree, dir: Identity, run: Run) -> Result<Option<(Block, u64)>> {
    let value = tree.get(&NumberKey::Block(dir, run).encode())?;
    value.map(|value| read_block(run, &value)).transpose()
}

/// First number and owner of the stored block that has this number. The owner may be gone.
pub(crate) fn stored_owner(tree: &Tree, ino: Ino) -> Result<Option<(u64, (Identity, Run))>> {
    owner_by(&|key| tree.get(key), ino)
}

/// The place of a pinned number.
pub(crate) fn stored_pin(tree: &Tree, ino: Ino) -> Result<Option<(Identity, Slot)>> {
    pin_by(&|key| tree.get(key), ino)
}

/// Reads the value of a key: of the tree, or of one moment.
pub(crate) type Get<'a> = &'a dyn Fn(&[u8]) -> ramet_betree::Result<Option<Bytes>>;

/// The stored block of a run, as `get` tells.
pub(crate) fn block_by(get: Get<'_>, dir: Identity, run: Run) -> Result<Option<Block>> {
    let value = get(&NumberKey::Block(dir, run).encode())?;
    let block = value.map(|value| read_block(run, &value)).transpose()?;
    Ok(block.map(|(block, _)| block))
}

/// As [`stored_owner`], as `get` tells.
pub(crate) fn owner_by(get: Get<'_>, ino: Ino) -> Result<Option<(u64, (Identity, Run))>> {
    for (class, len) in RUN_LENS.into_iter().enumerate() {
        let base = ino.0 & !(len - 1);
        if let Some(value) = get(&NumberKey::Owner(base).encode())? {
            let owner = read_owner(&value)?;
            if owner.1.class() == class {
                return Ok(Some((base, owner)));
            }
        }
    }
    Ok(None)
}

/// The place of a pinned number, as `get` tells.
pub(crate) fn pin_by(get: Get<'_>, ino: Ino) -> Result<Option<(Identity, Slot)>> {
    let value = get(&NumberKey::Pinned(ino).encode())?;
    value.map(|value| read_place(&value)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_values_of_blocks_with_marks() {
        let owner = (Identity::ROOT, Run(0));
        let block = Block {
            base: 8,
            generation: 0x0102,
        };
        let put = |marks| {
            let (tree, key) = (tree(), NumberKey::Block(owner.0, owner.1).encode());
            let mut batch = Batch::new();
            put_marks(&mut batch, owner, block, marks);
            tree.apply(batch).expect("there is room");
            tree.get(&key).expect("reads").expect("is there")
        };
        let all = [8, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(put(0xff)[..], all);
        let some = [&all[..], &[0b101, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(put(0b101)[..], some);
        for (value, marks) in [(&all[..], 0xff), (&some, 0b101)] {
            assert_eq!(read_block(Run(0), value).expect("is right"), (block, marks));
        }
        // Marks of more slots than the run has, all marks with bytes, and other lengths.
        let with = |marks: u64| [&all[..], &marks.to_le_bytes()].concat();
        for wrong in [
            with(0x100),
            with(0xff),
            all[..8].to_vec(),
            with(0)[..20].to_vec(),
        ] {
            assert!(read_block(Run(0), &wrong).is_err());
        }
        assert!(read_block(Run(1), &with(0x100)).is_ok());
    }

    fn tree() -> Tree {
        let device: std::sync::Arc<dyn ramet_block::Device> =
            std::sync::Arc::new(ramet_block::MemDevice::new(64 << 20));
        crate::Volume::format(&device, &crate::FormatOptions::default()).expect("formats");
        Tree::open(device, ramet_betree::OpenOptions::default()).expect("opens")
    }
}
