//! Replays after crashes, over old frames and damaged frames; and the bytes of a frame.

use ramet_block::checksum;

use super::*;
use crate::journal::frame::{MAGIC, is_intact};

#[test]
fn bytes_of_a_frame_are_pinned() {
    let dev = memory();
    let at = JournalPos {
        offset: REGION.len + 3 * BLOCK_BYTES,
        frame: 9,
    };
    let journal = open(dev.clone(), at);
    journal.append(77, &[b"ab", b"", b"c"], false);
    journal.append(80, &[], false);
    journal.commit(80).unwrap();
    let bytes = bytes_of(&*dev);
    let frame = &bytes[place_of(at)..place_of(at) + BLOCK];
    let mut expected = vec![
        0, 0, 0, 0, 0, 0, 0, 0, // checksum, set below
        b'R', b'm', b'J', b'f', 0, 0, 0, 0, // magic, mask
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, // uuid low
        5, 0, 0, 0, 0, 0, 0, 0, // epoch
        9, 0, 0, 0, 0, 0, 0, 0, // frame
        0, 0x30, 4, 0, 0, 0, 0, 0, // offset
        9, 0, 0, 0, 0, 0, 0, 0, // durable before
        77, 0, 0, 0, 0, 0, 0, 0, // first seq
        27, 0, 0, 0, 2, 0, 0, 0, // payload len, record count
        27, 0, 0, 0, 0, 0, 0, 0, // stored len, codec
        77, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, b'a', b'b', b'c', // first record
        80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // second record
    ];
    let sum = checksum(&expected[8..]);
    assert_eq!(
        sum, 12_613_215_315_632_732_325,
        "the checksum is part of the format"
    );
    expected[..8].copy_from_slice(&sum.to_le_bytes());
    expected.resize(BLOCK, 0);
    assert_eq!(frame, expected);
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), {
        expected.iter().filter(|byte| **byte != 0).count()
    });
}

#[test]
fn records_come_back_in_order_from_several_frames() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    let mut expected = Vec::new();
    for seq in 1..=60_u64 {
        let record = vec![seq as u8; (seq as usize * 37) % 2900];
        let (front, back) = record.split_at(record.len() / 3);
        journal.append(seq, &[front, back], false);
        expected.push((seq, record));
    }
    journal.commit(60).unwrap();
    let end = journal.cut();
    assert!(end.frame > 1, "more than a frame holds");
    assert_eq!(journal.used_bytes(), end.offset);
    assert_eq!(replay(&*dev, JournalPos::default()), (expected, end));
}

/// Three frames, the last of which spans several blocks.
fn three_frames() -> (Vec<u8>, JournalPos, JournalPos) {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 100);
    put(&journal, 2, 9000);
    let last = journal.cut();
    put(&journal, 3, 3 * BLOCK);
    (bytes_of(&*dev), last, journal.cut())
}

#[test]
fn a_tail_torn_at_any_byte_ends_before_its_frame() {
    let (bytes, last, end) = three_frames();
    let (start, stop) = (place_of(last), place_of(end));
    assert_eq!(replay(&device_of(&bytes), JournalPos::default()).1, end);
    let covered = HEADER_BYTES + RECORD_HEADER_BYTES + 3 * BLOCK;
    for cut in start..stop {
        let mut front_lost = bytes.clone();
        front_lost[start..cut].fill(0);
        let mut back_lost = bytes.clone();
        back_lost[cut..stop].fill(0);
        let mut one_lost = bytes.clone();
        let sector = cut - cut % SECTOR;
        one_lost[sector..sector + SECTOR].fill(0);
        for (torn, harmless) in [
            (front_lost, cut == start),
            (back_lost, cut >= start + covered),
            (one_lost, sector >= start + covered),
        ] {
            let (found, at) = replay(&device_of(&torn), JournalPos::default());
            let expected = if harmless {
                (vec![1, 2, 3], end)
            } else {
                (vec![1, 2], last)
            };
            assert_eq!((seqs(&found), at), expected, "torn at byte {}", cut - start);
        }
    }
}

/// A packed frame between two small ones, the place of the packed one, and the end.
fn packed_frames() -> (Vec<u8>, JournalPos, JournalPos) {
    let dev = memory();
    // Bytes that an earlier lap left.
    dev.write_at(REGION.addr, &noise(9, 40 * BLOCK)).unwrap();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 100);
    let packed = journal.cut();
    for seq in 2..=40 {
        journal.append(seq, &[&text(seq, 1500)], false);
    }
    journal.commit(40).unwrap();
    put(&journal, 41, 100);
    (bytes_of(&*dev), packed, journal.cut())
}

fn stored_bytes(bytes: &[u8], at: JournalPos) -> usize {
    let field = place_of(at) + 72;
    let len = u32::from_le_bytes(bytes[field..field + 4].try_into().unwrap());
    HEADER_BYTES + len as usize
}

#[test]
fn a_packed_frame_takes_its_raw_place_and_writes_less() {
    let (bytes, packed, end) = packed_frames();
    let raw = HEADER_BYTES + 39 * (RECORD_HEADER_BYTES + 1500);
    let taken = raw.next_multiple_of(BLOCK);
    assert_eq!(end.offset, packed.offset + (taken + BLOCK) as u64);
    let stored = stored_bytes(&bytes, packed);
    assert!(stored < raw / 3, "{stored} bytes of {raw}");
    let unwritten = stored.next_multiple_of(BLOCK)..taken;
    let stale = noise(9, 40 * BLOCK);
    assert_eq!(
        bytes[place_of(packed)..][unwritten.clone()],
        stale[BLOCK..][unwritten],
        "nothing is written behind the stored records"
    );
    let (found, at) = replay(&device_of(&bytes), JournalPos::default());
    let expected = (1..=41).map(|seq| match seq {
        1 | 41 => (seq, noise(seq, 100)),
        _ => (seq, text(seq, 1500)),
    });
    assert_eq!((found, at), (expected.collect(), end));
}

#[test]
fn a_packed_frame_torn_or_flipped_anywhere_is_missed() {
    let (bytes, packed, end) = packed_frames();
    let stored = stored_bytes(&bytes, packed);
    let judge = |image: &[u8]| replay_as(&device_of(image), UUID, EPOCH, JournalPos::default());
    for byte in 0..stored.next_multiple_of(BLOCK) + BLOCK {
        let at = place_of(packed) + byte;
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (byte % 8);
        let mut torn = bytes.clone();
        torn[at..at + SECTOR - byte % SECTOR].fill(0);
        for image in [flipped, torn] {
            let is_same = image == bytes;
            match judge(&image) {
                Ok((found, at)) => {
                    assert!(byte >= stored || is_same, "byte {byte}");
                    assert_eq!((found.len(), at), (41, end));
                }
                Err(error) => {
                    assert!(byte < stored, "byte {byte}");
                    assert!(matches!(error, Error::Corrupt { .. }), "byte {byte}");
                }
            }
        }
    }
}

#[test]
fn short_frames_and_those_of_a_volume_without_a_codec_stay_raw() {
    for (codec, len, is_packed) in [
        (Codec::Lz4, 4 * BLOCK, true),
        (Codec::Lz4, 3 * BLOCK - 200, false),
        (Codec::Raw, 4 * BLOCK, false),
    ] {
        let dev = memory();
        let journal = Journal::open(
            dev.clone(),
            REGION,
            UUID,
            EPOCH,
            codec,
            JournalPos::default(),
        );
        journal.append(1, &[&text(1, len)], false);
        journal.commit(1).unwrap();
        let stored = stored_bytes(&bytes_of(&*dev), JournalPos::default());
        assert_eq!(stored < len, is_packed, "{stored} of {len} bytes");
        assert_eq!(
            journal.written_bytes(),
            stored.next_multiple_of(BLOCK) as u64
        );
    }
}

/// Forged headers under a right checksum.
#[test]
fn forged_lengths_and_codecs_of_a_packed_frame_are_refused() {
    let (bytes, packed, _) = packed_frames();
    let start = place_of(packed);
    let field =
        |at: usize| u32::from_le_bytes(bytes[start + at..start + at + 4].try_into().unwrap());
    let (payload_len, stored_len, codec) = (field(64), field(72), field(76));
    // Place, value, and whether the frame still looks like one.
    let forged = [
        (64, payload_len + 1, true),
        (64, payload_len - 1, true),
        (64, stored_len, true),
        (64, stored_len - 1, false),
        (64, u32::MAX, false),
        (76, 0, true),
        (76, 3, true),
        (76, codec + 256, true),
    ];
    for (at, value, is_frame) in forged {
        let mut bytes = bytes.clone();
        bytes[start + at..start + at + 4].copy_from_slice(&value.to_le_bytes());
        // No later frame shows that this one is missing.
        bytes[start + stored_len as usize + HEADER_BYTES..].fill(0);
        let sum = checksum(&bytes[start + 8..start + HEADER_BYTES + stored_len as usize]);
        bytes[start..start + 8].copy_from_slice(&sum.to_le_bytes());
        let answer = replay_as(&device_of(&bytes), UUID, EPOCH, JournalPos::default());
        let is_corrupt = matches!(answer, Err(Error::Corrupt { .. }));
        assert_eq!(is_corrupt, is_frame, "{value} at {at}: {answer:?}");
        assert!(is_corrupt || answer.is_ok_and(|(found, _)| found.len() == 1));
    }
}

#[test]
fn a_raw_frame_that_claims_more_records_than_it_stores_is_refused() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 100);
    let (mut bytes, start) = (bytes_of(&*dev), place_of(JournalPos::default()));
    bytes[start + 64] += 1;
    let covered = stored_bytes(&bytes, JournalPos::default());
    let sum = checksum(&bytes[start + 8..start + covered]);
    bytes[start..start + 8].copy_from_slice(&sum.to_le_bytes());
    let answer = replay_as(&device_of(&bytes), UUID, EPOCH, JournalPos::default());
    assert!(matches!(answer, Err(Error::Corrupt { .. })), "{answer:?}");
}

/// Bytes written by hand: frames of both codecs are read by any volume.
#[test]
fn bytes_of_packed_frames_are_pinned() {
    let body = vec![b'a'; 20_000];
    let lz4_front = [0x22, 77, 0, 1, 0, 0x5f, 0x20, 0x4e, 0, 0, b'a', 1, 0];
    let lz4_back = [0x54, 0x60, b'a', b'a', b'a', b'a', b'a', b'a'];
    let lz4 = [&lz4_front[..], &[0xff; 78], &lz4_back].concat();
    let zstd = [
        0x28, 0xb5, 0x2f, 0xfd, 0x60, 0x2c, 0x4d, 0x85, 0, 0, 0x38, 77, 0, 0x20, 0x4e, 0, 0, b'a',
        2, 0, 0x1c, 0x0e, 0xd8, 0x1a, 3, 0x58,
    ];
    for (codec, packed) in [(1u32, &lz4[..]), (2, &zstd)] {
        let mut frame = vec![0; 8];
        frame.extend_from_slice(b"RmJf\0\0\0\0");
        for word in [UUID, EPOCH, 0, 0, 0, 77] {
            frame.extend_from_slice(&word.to_le_bytes());
        }
        for word in [20_012, 1, packed.len() as u32, codec] {
            frame.extend_from_slice(&word.to_le_bytes());
        }
        frame.extend_from_slice(packed);
        let sum = checksum(&frame[8..]);
        frame[..8].copy_from_slice(&sum.to_le_bytes());
        let dev = memory();
        dev.write_at(REGION.addr, &frame).unwrap();
        let (found, end) = replay(&*dev, JournalPos::default());
        assert_eq!(found, [(77, body.clone())]);
        assert_eq!(end.offset, 5 * BLOCK_BYTES);
    }
}

#[test]
fn any_flipped_bit_of_the_last_frame_drops_it() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 10);
    let last = journal.cut();
    put(&journal, 2, 200);
    let end = journal.cut();
    let bytes = bytes_of(&*dev);
    let covered = HEADER_BYTES + RECORD_HEADER_BYTES + 200;
    for byte in 0..BLOCK {
        // Every bit of header and record header, one bit of the other bytes.
        let bits = if byte < HEADER_BYTES + RECORD_HEADER_BYTES {
            0..8
        } else {
            3..4
        };
        for bit in bits {
            let mut flipped = bytes.clone();
            flipped[place_of(last) + byte] ^= 1 << bit;
            let (found, at) = replay(&device_of(&flipped), JournalPos::default());
            let expected = if byte < covered {
                (vec![1], last)
            } else {
                (vec![1, 2], end)
            };
            assert_eq!((seqs(&found), at), expected, "bit {bit} of byte {byte}");
        }
    }
}

#[test]
fn a_lost_frame_that_was_durable_is_reported() {
    let (bytes, last, _) = three_frames();
    for byte in [0, 9, 20, 33, 41, 50, 60, 65, 70, 80, 5000] {
        let mut flipped = bytes.clone();
        // The frame of record 2 starts one block after the start.
        flipped[place_of(JournalPos::default()) + BLOCK + byte] ^= 4;
        let answer = replay_as(&device_of(&flipped), UUID, EPOCH, JournalPos::default());
        let Err(Error::Corrupt {
            what: "journal frame",
            addr,
            ..
        }) = answer
        else {
            panic!("byte {byte}: {answer:?}");
        };
        assert_eq!(addr, REGION.addr + BLOCK_BYTES);
        let (found, _) = replay_as(&device_of(&flipped), UUID, EPOCH, last).unwrap();
        assert_eq!(
            seqs(&found),
            [3],
            "a replay that starts later does not miss it"
        );
    }
}

#[test]
fn a_lost_frame_that_was_durable_is_reported_across_the_end_of_a_lap() {
    let dev = memory();
    let at = JournalPos {
        offset: REGION.len - 2 * BLOCK_BYTES,
        frame: 40,
    };
    let journal = open(dev.clone(), at);
    put(&journal, 1, 10);
    let second = journal.cut();
    put(&journal, 2, 3 * BLOCK);
    put(&journal, 3, 10);
    for lost in [place_of(at), place_of(JournalPos::default())] {
        let mut bytes = bytes_of(&*dev);
        assert!(is_intact(&bytes[lost..lost + HEADER_BYTES]) || bytes[lost + 8] == b'R');
        bytes[lost] ^= 1;
        let start = if lost == place_of(at) { at } else { second };
        let answer = replay_as(&device_of(&bytes), UUID, EPOCH, start);
        assert!(matches!(answer, Err(Error::Corrupt { .. })), "{answer:?}");
    }
}

#[test]
fn a_torn_frame_before_others_that_were_never_synced_ends_quietly() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 10);
    let torn = journal.cut();
    for seq in 2..5 {
        journal.append(seq, &[&[7; 5000]], false);
        journal.write_queued().unwrap();
    }
    assert_eq!(seqs(&replay(&*dev, JournalPos::default()).0), [1, 2, 3, 4]);
    let mut bytes = bytes_of(&*dev);
    bytes[place_of(torn) + BLOCK] ^= 1;
    let (found, at) = replay(&device_of(&bytes), JournalPos::default());
    assert_eq!((seqs(&found), at), (vec![1], torn));
}

#[test]
fn frames_of_another_lap_epoch_or_volume_are_no_frames() {
    let (bytes, last, end) = three_frames();
    let dev = device_of(&bytes);
    let nothing = (vec![], JournalPos::default());
    assert_eq!(
        replay_as(&dev, UUID, EPOCH + 1, JournalPos::default()).unwrap(),
        nothing
    );
    assert_eq!(
        replay_as(&dev, UUID, EPOCH - 1, JournalPos::default()).unwrap(),
        nothing
    );
    assert_eq!(
        replay_as(&dev, UUID + 1, EPOCH, JournalPos::default()).unwrap(),
        nothing
    );
    let next_lap = JournalPos {
        offset: last.offset + REGION.len,
        frame: last.frame,
    };
    assert_eq!(replay(&dev, next_lap), (vec![], next_lap));
    let other_number = JournalPos {
        offset: last.offset,
        frame: last.frame + 1,
    };
    assert_eq!(replay(&dev, other_number), (vec![], other_number));
    assert_eq!(replay(&dev, end), (vec![], end));
}

#[test]
fn a_dropped_tail_stays_dropped_after_the_next_mount() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 10);
    let cut = journal.cut();
    for seq in 2..5 {
        put(&journal, seq, 10);
    }
    // A mount recovered record 1 only, in a new epoch, and writes one frame in place of frame 2.
    let journal = Journal::open(dev.clone(), REGION, UUID, EPOCH + 1, Codec::Raw, cut);
    put(&journal, 2, 20);
    let (found, at) = replay_as(&*dev, UUID, EPOCH + 1, cut).unwrap();
    assert_eq!((seqs(&found), at), (vec![2], journal.cut()));
    assert_eq!(found[0].1.len(), 20);
}

#[test]
fn an_image_of_a_frame_inside_a_record_is_not_taken_for_one() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 10);
    let torn = journal.cut();
    // The frame that would follow the record's own frame, forged one block into it. A replay would
    // find it if the first block of the record were lost and the forged frame took its number and
    // place.
    let inside = JournalPos {
        offset: torn.offset + BLOCK_BYTES,
        frame: torn.frame + 1,
    };
    let mut forged = FrameBuilder::default();
    forged.push(666, &[b"forged"]);
    let forged = forged.finish(
        Codec::Raw,
        Timeline {
            uuid_low: UUID,
            epoch: EPOCH,
        },
        inside,
        torn.frame + 1,
    );
    let lead_in = BLOCK - HEADER_BYTES - RECORD_HEADER_BYTES;
    let mut record = vec![0; lead_in];
    record.extend_from_slice(&forged);
    record.extend_from_slice(&forged);
    journal.append(2, &[&record], false);
    journal.commit(2).unwrap();

    let bytes = bytes_of(&*dev);
    let plain = bytes.windows(forged.len()).any(|window| window == forged);
    assert!(!plain, "the image lies on a block boundary and is masked");
    let (found, _) = replay(&*dev, JournalPos::default());
    assert_eq!(found[1].1, record, "and comes back as it was");
    let (found, end) = replay(&*dev, inside);
    assert_eq!((found, end), (vec![], inside));
    let mut lost = bytes;
    lost[place_of(torn)] ^= 1;
    let (found, end) = replay(&device_of(&lost), JournalPos::default());
    assert_eq!(
        (seqs(&found), end),
        (vec![1], torn),
        "nor is it proof of a lost frame"
    );
}

#[test]
fn a_mask_is_found_whatever_the_words_are() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    // Words that rule out the masks 0, 1, 2, ... one after the other.
    let mut record = noise(1, 15 * BLOCK);
    for block in 1..15_u32 {
        let at = block as usize * BLOCK + 8 - HEADER_BYTES - RECORD_HEADER_BYTES;
        record[at..at + 4].copy_from_slice(&(MAGIC ^ (block - 1)).to_le_bytes());
    }
    journal.append(1, &[&record], false);
    journal.commit(1).unwrap();
    let bytes = bytes_of(&*dev);
    let start = place_of(JournalPos::default());
    let magics = (start..).step_by(BLOCK).take(16);
    let magics = magics.filter(|at| bytes[at + 8..at + 12] == MAGIC.to_le_bytes());
    assert_eq!(magics.count(), 1);
    assert_eq!(replay(&*dev, JournalPos::default()).0, [(1, record)]);
}

#[test]
fn the_journal_runs_many_laps_and_any_crash_leaves_a_prefix() {
    let seed = first_seed();
    for seed in seed..seed + 40 {
        println!("RAMET_SEED={seed}");
        run_laps(seed);
    }
}

/// Random appends, commits, writes, cuts and releases, with a crash image checked after each. The
/// records after the released position are there, in order, without gaps, and at least up to the
/// acknowledged record.
fn run_laps(seed: u64) {
    let mut rng = Rng(seed);
    let dev = CrashDevice::new();
    let journal = open(dev.clone(), JournalPos::default());
    let mut appended: Records = Vec::new();
    let mut released = (JournalPos::default(), 0);
    let mut cuts: VecDeque<(JournalPos, u64)> = VecDeque::new();
    let mut acknowledged = 0;
    let mut seq = 0;
    for _ in 0..600 {
        match rng.below(11) {
            0..=4 => {
                let most = if rng.below(4) == 0 {
                    record_bytes_max(REGION.len) as u64
                } else {
                    900
                };
                let len = usize::try_from(rng.below(most + 1)).unwrap();
                if journal.room_for(len).is_some() {
                    seq += 1 + rng.below(3);
                    let record: Vec<u8> = (0..len).map(|at| (at as u64 ^ seq) as u8).collect();
                    journal.append(seq, &[&record], false);
                    appended.push((seq, record));
                } else {
                    // A checkpoint of everything.
                    cuts.push_back((journal.cut(), seq));
                    released = cuts.drain(..).next_back().unwrap();
                    journal.release(released.0);
                    acknowledged = acknowledged.max(released.1);
                }
            }
            5 | 6 => {
                journal
                    .commit(seq)
                    .expect("room was asked for every record");
                acknowledged = seq;
            }
            7 => journal.write_queued().unwrap(),
            8 => cuts.push_back((journal.cut(), seq)),
            9 => {
                // Before the checkpoint is durable, a replay from the place before finds all frames.
                cuts.push_back((journal.host_room().cut_at_front(), seq));
                journal.append(seq + 1, &[b"in front"], false);
                seq += 1;
                appended.push((seq, b"in front".to_vec()));
                if journal.commit(seq).is_ok() {
                    acknowledged = seq;
                }
                let cut = cuts.drain(..).next_back().unwrap();
                if rng.below(2) == 0 {
                    let (found, _) = replay(&dev.crash(&mut rng), released.0);
                    assert!(acknowledged < seq || found.last() == appended.last());
                }
                journal.release(cut.0);
                released = cut;
                acknowledged = acknowledged.max(cut.1);
            }
            _ => {
                if let Some(cut) = cuts.pop_front() {
                    journal.release(cut.0);
                    released = cut;
                    acknowledged = acknowledged.max(cut.1);
                }
            }
        }
        assert!(journal.used_bytes() <= REGION.len);
        assert_eq!(journal.durable_seq(), acknowledged);
        let (found, _) = replay(&dev.crash(&mut rng), released.0);
        let expected = appended.iter().filter(|(seq, _)| *seq > released.1);
        assert!(
            found
                .iter()
                .zip(expected.clone())
                .all(|(found, expected)| found == expected)
        );
        assert!(found.len() <= expected.clone().count());
        let must = expected.filter(|(seq, _)| *seq <= acknowledged).count();
        assert!(
            found.len() >= must,
            "{} of {must} acknowledged records",
            found.len()
        );
    }
    assert!(
        journal.cut().offset > 3 * REGION.len,
        "the run covers several laps"
    );
}

#[test]
fn no_bytes_make_a_replay_panic() {
    let seed = first_seed();
    let images = [three_frames(), packed_frames()];
    for seed in seed..seed + 600 {
        println!("RAMET_SEED={seed}");
        let mut rng = Rng(seed);
        let (bytes, _, end) = &images[usize::from(seed % 2 == 0)];
        let region = place_of(JournalPos::default())..place_of(*end) + 4 * BLOCK;
        let mut bytes = bytes.clone();
        // Wrong fields under a right checksum reach the checks behind it.
        for _ in 0..=rng.below(4) {
            let frame = region.start + usize::try_from(rng.below(5)).unwrap() * BLOCK;
            let at = frame + 8 + usize::try_from(rng.below(110)).unwrap();
            bytes[at] = rng.next() as u8;
            let len = u32::from_le_bytes(bytes[frame + 72..frame + 76].try_into().unwrap());
            let covered = HEADER_BYTES + len as usize;
            if rng.below(8) != 0 && frame + covered <= bytes.len() {
                let sum = checksum(&bytes[frame + 8..frame + covered]);
                bytes[frame..frame + 8].copy_from_slice(&sum.to_le_bytes());
            }
        }
        let answer = replay_as(&device_of(&bytes), UUID, EPOCH, JournalPos::default());
        assert!(
            matches!(answer, Ok(_) | Err(Error::Corrupt { .. })),
            "{answer:?}"
        );
    }
}

#[test]
fn positions_and_regions_that_cannot_be_are_refused() {
    let dev = memory();
    let replay = |region, start| {
        let none = &mut |_, _: &[u8]| Ok(());
        Journal::replay(&*dev, region, (UUID, EPOCH), start, None, none).unwrap_err()
    };
    let huge = JournalPos {
        offset: u64::MAX - 4095,
        frame: 1,
    };
    assert!(matches!(replay(REGION, huge), Error::Invalid(_)));
    let odd = JournalPos {
        offset: 100,
        frame: 1,
    };
    assert!(matches!(replay(REGION, odd), Error::Invalid(_)));
    for region in [
        Extent { addr: 0, len: 0 },
        Extent {
            addr: 1,
            len: REGION.len,
        },
        Extent {
            addr: 0,
            len: REGION.len + 1,
        },
        Extent {
            addr: u64::MAX - 4095,
            len: REGION.len,
        },
    ] {
        assert!(matches!(
            replay(region, JournalPos::default()),
            Error::Invalid(_)
        ));
    }
    let outside = Extent {
        addr: DEVICE_BYTES,
        len: REGION.len,
    };
    assert!(matches!(
        replay(outside, JournalPos::default()),
        Error::Io { .. }
    ));
}

#[test]
fn errors_of_the_visitor_end_the_replay() {
    let (bytes, _, _) = three_frames();
    let mut seen = 0;
    let answer = Journal::replay(
        &device_of(&bytes),
        REGION,
        (UUID, EPOCH),
        JournalPos::default(),
        None,
        &mut |_, _| {
            seen += 1;
            if seen == 2 {
                Err(Error::ReadOnly)
            } else {
                Ok(())
            }
        },
    );
    assert!(matches!(answer, Err(Error::ReadOnly)));
    assert_eq!(seen, 2);
}
