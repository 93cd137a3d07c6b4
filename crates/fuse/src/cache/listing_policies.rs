//! What comes with a listing, where the kernel leaves that to the server.

use crate::cache::first_entry_policy::FirstEntryPolicy;
use crate::cache::readdirplus_policy::ReaddirplusPolicy;

/// What programs get of a directory, where the kernel leaves that to the server.
#[derive(Default)]
pub(crate) struct ListingPolicies {
    pub(crate) attributes: ReaddirplusPolicy,
    pub(crate) first_entry: FirstEntryPolicy,
}
