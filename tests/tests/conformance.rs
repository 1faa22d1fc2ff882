//! Runs the conformance suite of `tests/conformance` on PVM 3.4.6 and on Sempa.

use sempa_tests::conformance::{System, differences, judge, outcomes};
use sempa_tests::requirements;

/// Minimum number of checked sentences. It shows that the programs have run.
const SENTENCES_MIN: usize = 300;

fn check_system(system: System) {
    requirements::require(requirements::lacks());
    let outcomes = outcomes(system, &[]).expect("the programs compile and the system starts");
    let verdict = judge(
        &[(system, outcomes)],
        &differences().expect("every difference is explained"),
        true,
    );
    assert!(verdict.unexplained.is_empty(), "{}", verdict.text());
    assert!(
        verdict.sentences.len() >= SENTENCES_MIN,
        "only {} sentences",
        verdict.sentences.len()
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn sentences_hold_on_pvm_except_known_defects() {
    check_system(System::Pvm3);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn sentences_hold_with_our_header() {
    check_system(System::Sempa);
}

/// The programs were compiled and linked for Debian's library.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn sentences_hold_for_debian_binaries() {
    check_system(System::SempaUnchanged);
}

#[test]
fn every_known_difference_is_in_the_page_for_users() {
    differences().expect("each line has three parts, and its words are in docs/COMPATIBILITY.md");
}
