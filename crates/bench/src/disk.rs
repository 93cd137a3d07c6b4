//! A model of a disk of 7200 turns a minute: the time that it takes for requests, without such a
//! disk.
//!
//! A limit of requests a second would be unfair to small ones in sequence, which cost a disk next
//! to nothing. So the requests that a device got, in the order in which they were issued, are given
//! the times of a disk: a seek that grows with the square root of the distance, half a turn, and
//! the transfer. Writes are sorted before they are served, within windows of [`WINDOW`] requests
//! that end at a flush or a read; a short hop forwards costs no more than waiting until the platter
//! has come by.

use crate::trace::{Kind, Request};

/// Seek over a third of the disk, the mean distance of random places, in seconds.
const SEEK_MEAN_S: f64 = 8.5e-3;
/// Least time of a seek to another track.
const SEEK_LEAST_S: f64 = 0.8e-3;
const HALF_TURN_S: f64 = 4.17e-3;
const BYTES_PER_S: f64 = 120e6;
/// Writes that a disk with a queue sorts.
const WINDOW: usize = 128;

/// Seconds of a traced phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DiskTime {
    /// By the rules above.
    pub sorted_s: f64,
    /// By the plain rule: a request that does not continue the last one costs a seek and half a
    /// turn.
    pub plain_s: f64,
}

/// Time for `requests`, on a disk of `device_bytes` whose head rests at its beginning.
pub(crate) fn time(requests: &[Request], device_bytes: u64) -> DiskTime {
    let mut sum = DiskTime::default();
    let mut plain_at = None;
    for request in requests
        .iter()
        .filter(|r| r.bytes > 0 && r.kind != Kind::Discard)
    {
        if plain_at != Some(request.offset) {
            sum.plain_s += SEEK_MEAN_S + HALF_TURN_S;
        }
        sum.plain_s += request.bytes as f64 / BYTES_PER_S;
        plain_at = Some(request.offset + request.bytes);
    }
    let mut at = 0;
    let mut window: Vec<&Request> = Vec::new();
    for request in requests {
        match request.kind {
            Kind::Write => {
                window.push(request);
                if window.len() == WINDOW {
                    sum.sorted_s += serve_window(&mut window, &mut at, device_bytes);
                }
            }
            Kind::Read => {
                sum.sorted_s += serve_window(&mut window, &mut at, device_bytes);
                sum.sorted_s += serve(request, &mut at, device_bytes);
            }
            Kind::Flush => sum.sorted_s += serve_window(&mut window, &mut at, device_bytes),
            Kind::Discard => {}
        }
    }
    sum.sorted_s += serve_window(&mut window, &mut at, device_bytes);
    sum
}

fn serve_window(window: &mut Vec<&Request>, at: &mut u64, device_bytes: u64) -> f64 {
    window.sort_by_key(|request| request.offset);
    window
        .drain(..)
        .map(|request| serve(request, at, device_bytes))
        .sum()
}

fn serve(request: &Request, at: &mut u64, device_bytes: u64) -> f64 {
    let distance = request.offset.abs_diff(*at);
    let jump_s = if distance == 0 {
        0.0
    } else {
        let share = distance as f64 / (device_bytes as f64 / 3.0);
        let jump_s = (SEEK_MEAN_S * share.sqrt()).max(SEEK_LEAST_S) + HALF_TURN_S;
        if request.offset > *at {
            jump_s.min(distance as f64 / BYTES_PER_S)
        } else {
            jump_s
        }
    };
    *at = request.offset + request.bytes;
    jump_s + request.bytes as f64 / BYTES_PER_S
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: u64 = 3 << 30;

    fn request(kind: Kind, offset: u64, bytes: u64) -> Request {
        Request {
            kind,
            offset,
            bytes,
        }
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }

    #[test]
    fn a_request_that_follows_costs_its_transfer_only() {
        let all: Vec<_> = (0..100)
            .map(|n| request(Kind::Read, n * 12_000, 12_000))
            .collect();
        near(time(&all, DEVICE).sorted_s, 0.01);
    }

    #[test]
    fn a_jump_costs_a_seek_by_distance_and_half_a_turn() {
        let all = [request(Kind::Read, 1 << 30, 0)];
        near(time(&all, DEVICE).sorted_s, SEEK_MEAN_S + HALF_TURN_S);
        let all = [request(Kind::Read, 1 << 28, 0)];
        near(time(&all, DEVICE).sorted_s, SEEK_MEAN_S / 2.0 + HALF_TURN_S);
    }

    #[test]
    fn a_short_hop_forwards_waits_for_the_platter() {
        let all = [request(Kind::Read, 120_000, 0)];
        near(time(&all, DEVICE).sorted_s, 1e-3);
    }

    #[test]
    fn writes_are_sorted_up_to_a_flush() {
        let (a, b) = (
            request(Kind::Write, 0, 12_000),
            request(Kind::Write, 12_000, 12_000),
        );
        let flush = request(Kind::Flush, 0, 0);
        near(time(&[b, a], DEVICE).sorted_s, 2e-4);
        let apart = time(&[b, flush, a], DEVICE).sorted_s;
        assert!(apart > 4e-3, "{apart}");
        assert!(time(&[b, a], DEVICE).plain_s > 2.0 * SEEK_MEAN_S);
    }
}
