//! Journals of arbitrary frames and records, with right checksums, behind a valid checkpoint.
//!
//! Where no record names extents, what a replay makes must keep all invariants and be there again after a checkpoint.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ramet_betree::Tree;
use ramet_block::codec::compress;
use ramet_block::superblock::read_superblock;
use ramet_block::{BLOCK_BYTES, Codec, Device, Superblock, Writer};
use ramet_fuzz::{Base, base, scan_all};
use ramet_sim::SparseDevice;

const HEADER_BYTES: usize = 80;

/// Frames, as they are written one after the other.
struct Frames<'a> {
    sb: Superblock,
    device: &'a SparseDevice,
    /// A leaf where nothing is: address and used bytes.
    leaf: Option<(u64, u32)>,
    offset: u64,
    frame: u64,
    seq: u64,
    names_extents: bool,
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    // Those of the bases that are trees.
    let base = base([0, 1, 4][usize::from(u.arbitrary::<u8>().unwrap_or_default() % 3)]);
    let device = base.device();
    let sb = read_superblock(&device).expect("the base is valid");
    let mut frames = Frames {
        offset: sb.journal_start.offset,
        frame: sb.journal_start.frame,
        seq: sb.next_seq,
        leaf: plant_leaf(base, &device),
        sb,
        device: &device,
        names_extents: false,
    };
    for _ in 0..8 {
        if u.is_empty() || frames.push(&mut u).is_err() {
            break;
        }
    }
    let names_extents = frames.names_extents;
    let device: Arc<dyn Device> = Arc::new(device);
    let Ok(tree) = Tree::open(device.clone(), base.open.clone()) else {
        return;
    };
    let found = scan_all(&tree);
    let violations = tree.verify(&mut |_| {});
    let closed = tree.checkpoint().and_then(|()| tree.close());
    drop(tree);
    if names_extents {
        return;
    }
    assert_eq!(violations.expect("memory does not fail"), [""; 0]);
    if closed.is_ok() {
        let tree = Tree::open(device, base.open.clone()).expect("it was closed");
        assert!(scan_all(&tree) == found, "another tree after a checkpoint");
    }
});

/// Copies a leaf of the base to the end of the device, which is free.
fn plant_leaf(base: &Base, device: &SparseDevice) -> Option<(u64, u32)> {
    let place = device.len_bytes() - 64 * BLOCK_BYTES;
    base.places.iter().find_map(|&(addr, _)| {
        let mut head = [0; 16];
        device.read_at(addr, &mut head).ok()?;
        let [b'R', b'R', b'U', b'N', 1, ..] = head else {
            return None;
        };
        let used = u32::from_le_bytes(head[12..16].try_into().ok()?);
        let mut leaf = vec![0; used as usize];
        device.read_at(addr, &mut leaf).ok()?;
        device.write_at(place, &leaf).ok()?;
        Some((place, used))
    })
}

impl Frames<'_> {
    /// Writes one more frame.
    fn push(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut payload = Writer::new();
        let first_seq = self.seq;
        let mut count = 0u32;
        for _ in 0..u.int_in_range(1..=6u8)? {
            let body = if u.ratio(1u8, 8)? {
                let len = u.int_in_range(0..=u.len().min(64))?;
                u.bytes(len)?.to_vec()
            } else {
                self.record(u)?
            };
            payload.u64(self.seq);
            payload.u32(u32::try_from(body.len()).expect("a record is small"));
            payload.raw(&body);
            self.seq += u.int_in_range(1..=2u64)?;
            count += 1;
        }
        let mut payload = payload.into_vec();
        // Rarely something that no writer does.
        let odd: u8 = u.arbitrary()?;
        match odd {
            250 => self.offset += self.sb.journal.len,
            251 => self.frame += 1,
            // One of an earlier mount.
            252 => self.sb.epoch = self.sb.epoch.wrapping_sub(1),
            253 => count = count.wrapping_add(u.arbitrary()?),
            254 => payload.truncate(payload.len() / 2),
            255 => {
                let at = u.choose_index(payload.len())?;
                payload[at] ^= u.arbitrary::<u8>()?;
            }
            _ => {}
        }
        let mut raw_len = u32::try_from(payload.len()).expect("a frame is small");
        let mut codec = 0u32;
        if u.ratio(1u8, 4)? {
            codec = u.int_in_range(1..=2u32)?;
            let known = Codec::from_tag(codec as u8).expect("both are codecs");
            match compress(known, &payload) {
                Some(packed) => payload = packed,
                // Whatever it is, it claims to be packed.
                None => raw_len = raw_len.wrapping_add(u.arbitrary::<u16>()?.into()),
            }
        }
        match odd {
            247 => codec = u.arbitrary()?,
            248 => raw_len = u.arbitrary()?,
            _ => {}
        }
        let taken = (HEADER_BYTES + payload.len().max(raw_len as usize)) as u64;
        let len = taken.next_multiple_of(BLOCK_BYTES).min(self.sb.journal.len);
        if len > self.sb.journal.len - self.offset % self.sb.journal.len {
            self.offset = self.offset.next_multiple_of(self.sb.journal.len);
        }
        let mut header = Writer::new();
        header.u64(0);
        header.raw(b"RmJf");
        header.u32(0);
        header.raw(&self.sb.uuid[..8]);
        header.u64(self.sb.epoch);
        header.u64(self.frame);
        header.u64(self.offset);
        header.u64(if odd == 249 { u.arbitrary()? } else { 0 });
        header.u64(first_seq);
        header.u32(raw_len);
        header.u32(count);
        header.u32(u32::try_from(payload.len()).expect("a frame is small"));
        header.u32(codec);
        header.raw(&payload);
        let addr = self.sb.journal.addr + self.offset % self.sb.journal.len;
        let written = self.device.write_at(addr, header.as_slice());
        written.expect("the journal lies in the device");
        self.offset += len;
        self.frame += 1;
        Ok(())
    }

    fn record(&mut self, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let mut w = Writer::new();
        let ops = u.int_in_range(0..=5u64)?;
        w.varint(ops);
        for _ in 0..ops {
            match u.int_in_range(0..=11u8)? {
                0..=2 => {
                    w.u8(0);
                    put_key(&mut w, u)?;
                    let len = *u.choose(&[0, 1, 9, 200, 2000])?;
                    w.bytes(&vec![u.arbitrary()?; len]);
                }
                3 => {
                    w.u8(1);
                    put_key(&mut w, u)?;
                }
                4 => {
                    w.u8(2);
                    put_key(&mut w, u)?;
                    let offset = *u.choose(&[0, 1, 5, 4000, (1 << 20) - 4, 1 << 20, u64::MAX])?;
                    w.varint(offset);
                    let len = u.int_in_range(0..=4usize)?;
                    w.bytes(&vec![u.arbitrary()?; len]);
                }
                5 | 6 => {
                    w.u8(3);
                    put_key(&mut w, u)?;
                    put_end(&mut w, u)?;
                }
                7..=9 => {
                    w.u8(4);
                    // Mostly a whole prefix, since that is what may be translated.
                    if u.ratio(3u8, 4)? {
                        let mut prefix = key(u)?;
                        w.bytes(&prefix);
                        let strip = prefix.len() as u64;
                        match prefix.last_mut() {
                            Some(last) => {
                                *last = last.saturating_add(1);
                                w.u8(1);
                                w.bytes(&prefix);
                            }
                            None => w.u8(0),
                        }
                        w.varint(strip);
                    } else {
                        put_key(&mut w, u)?;
                        put_end(&mut w, u)?;
                        w.varint(*u.choose(&[0, 1, 2, 3, 9, 1 << 33])?);
                    }
                    put_key(&mut w, u)?;
                }
                10 => {
                    self.names_extents = true;
                    w.u8(5);
                    put_key(&mut w, u)?;
                    self.put_ingest(&mut w, u)?;
                }
                _ => w.u8(u.arbitrary()?),
            }
        }
        Ok(w.into_vec())
    }

    fn put_ingest(&self, w: &mut Writer, u: &mut Unstructured<'_>) -> Result<()> {
        let lo = key(u)?;
        w.bytes(&lo);
        put_end(w, u)?;
        let leaves = u.int_in_range(0..=2u8)?;
        w.varint(leaves.into());
        for n in 0..leaves {
            if n == 0 {
                w.bytes(&lo);
            } else {
                put_key(w, u)?;
            }
            w.varint(*u.choose(&[0, 1, 2, 9])?);
            let blocks = self.sb.volume_bytes / BLOCK_BYTES;
            let (addr, used) = match self.leaf {
                Some((addr, used)) if u.ratio(3u8, 4)? => (addr / BLOCK_BYTES, used),
                _ => (u.int_in_range(0..=blocks)?, u.arbitrary()?),
            };
            w.varint(addr);
            let len = u64::from(used).div_ceil(BLOCK_BYTES);
            w.varint(if u.ratio(1u8, 8)? {
                u.arbitrary()?
            } else {
                len
            });
            w.varint(used.into());
            w.u64(0);
        }
        Ok(())
    }
}

/// A short key of few letters, so that ranges meet.
fn key(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let len = u.int_in_range(0..=4usize)?;
    (0..len)
        .map(|_| u.choose(&[b'a', b'b', b'c', 0, 0xff]).copied())
        .collect()
}

fn put_key(w: &mut Writer, u: &mut Unstructured<'_>) -> Result<()> {
    w.bytes(&key(u)?);
    Ok(())
}

fn put_end(w: &mut Writer, u: &mut Unstructured<'_>) -> Result<()> {
    if u.ratio(1u8, 4)? {
        w.u8(0);
        return Ok(());
    }
    w.u8(1);
    put_key(w, u)
}
