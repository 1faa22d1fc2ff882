//! Tasks that migrate only if they belong to root: an ordinary user cannot start them.

use super::fixture::assert_survives;

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn groups_and_dumpability_are_kept() {
    assert_survives("processes", "groups");
}
