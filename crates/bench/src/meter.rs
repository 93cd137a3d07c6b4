//! The cost of a phase.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::Requests;
use crate::disk::DiskTime;

/// A kind of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Seconds as they come: the device is memory, so they show the processor's work, and wander.
    Raw,
    /// A cloud volume of 3000 requests and 125 MiB a second each way.
    Gp3,
    /// The time of a disk of 7200 turns a minute for the requests that were traced.
    Hdd,
}

const NAMES: [(&str, Profile); 3] = [
    ("raw", Profile::Raw),
    ("gp3", Profile::Gp3),
    ("hdd", Profile::Hdd),
];

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, profile)| profile == self);
        f.pad(name.map_or("?", |(name, _)| name))
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        let found = NAMES.iter().find(|(name, _)| *name == text);
        found
            .map(|(_, profile)| *profile)
            .ok_or(format!("`{text}` is none of raw, gp3, hdd"))
    }
}

/// How a pass over the experiments runs. One free pass gives `raw` and `hdd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Free { traced: bool },
    Throttled,
}

/// The cost of a phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub wall_s: f64,
    pub requests: Requests,
    /// When it was traced.
    pub disk: Option<DiskTime>,
    pub throttled: bool,
}

impl Cost {
    /// The mean of several costs, at least one.
    pub(crate) fn mean(costs: &[Cost]) -> Cost {
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let disks: Option<Vec<DiskTime>> = costs.iter().map(|cost| cost.disk).collect();
        Cost {
            wall_s: mean(costs.iter().map(|cost| cost.wall_s).collect()),
            requests: Requests::mean(costs.iter().map(|cost| cost.requests)),
            disk: disks.map(|disks| DiskTime {
                sorted_s: mean(disks.iter().map(|disk| disk.sorted_s).collect()),
                plain_s: mean(disks.iter().map(|disk| disk.plain_s).collect()),
            }),
            throttled: costs.iter().any(|cost| cost.throttled),
        }
    }

    /// The seconds that this phase tells, by profile.
    pub(crate) fn seconds(&self) -> Vec<(Profile, f64)> {
        if self.throttled {
            return vec![(Profile::Gp3, self.wall_s)];
        }
        let mut all = vec![(Profile::Raw, self.wall_s)];
        all.extend(self.disk.map(|disk| (Profile::Hdd, disk.sorted_s)));
        all
    }
}
