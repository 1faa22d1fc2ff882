//! Tasks that migrate, or are refused, only if they belong to root: an ordinary user cannot start
//! them, or needs a user namespace of its own for them, which is refused.

use super::common::migration_steps::{continue_and_wait, dump_and_wait, stop_and_wait};
use super::common::{migration_id, tid};
use super::fixture::{MigrationFixture, assert_survives};
use super::refusals::assert_refused;
use sempa_proto::migration::Failure;

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn groups_and_dumpability_are_kept() {
    assert_survives("processes", "groups");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_root_directory_of_its_own_is_refused() {
    assert_refused("own-root", "", "a root directory of its own");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_mount_namespace_of_its_own_is_refused() {
    assert_refused("own-mounts", "", "a mount namespace of its own");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_network_namespace_of_its_own_is_refused() {
    assert_refused("own-network", "", "a network namespace of its own");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_ipc_namespace_of_its_own_is_refused() {
    assert_refused("own-ipc", "", "an IPC namespace of its own");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_host_name_namespace_of_its_own_is_refused() {
    assert_refused("own-name", "", "a host-name namespace of its own");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_process_id_namespace_of_its_own_is_refused() {
    assert_refused("own-processes", "", "a process-id namespace of its own");
}

/// A process that has dropped the rights of root is refused.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn dropped_root_rights_are_refused() {
    assert_refused(
        "another-user",
        "",
        "a process without root's capabilities (its user is 4142)",
    );
}

/// A process with another group id is refused if the tasker may not read its resource limits.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn other_group_needs_a_privileged_tasker() {
    assert_refused(
        "another-group",
        "",
        "another user or group (4241), for which the tasker needs CAP_SYS_RESOURCE",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn own_network_of_a_thread_is_refused() {
    assert_refused(
        "network-of-a-thread",
        "",
        "with a network namespace of its own",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn own_host_name_of_a_thread_is_refused() {
    assert_refused(
        "name-of-a-thread",
        "",
        "with a host-name namespace of its own",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn own_children_namespace_of_a_thread_is_refused() {
    assert_refused(
        "processes-of-a-thread",
        "",
        "with a process-id namespace for its children of its own",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_control_group_namespace_of_its_own_is_refused() {
    assert_refused(
        "own-control-group",
        "",
        "a control-group namespace of its own",
    );
}

/// The dump of a task that has confined itself fails with an explanation, and the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn dump_of_a_confined_task_is_explained() {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("refused");
    fixture.start_and_wait_until_ready(&program, &[], "confined", "");
    fixture.inspect().expect("it cannot be seen from outside");
    let (source, migration) = (&mut fixture.source, migration_id(7));
    let images = fixture.dir.path().join("images");
    stop_and_wait(source, tid(1), migration, &mut Vec::new());
    let result = dump_and_wait(source, tid(1), migration, &images, &mut Vec::new());
    assert!(
        matches!(&result, Err(Failure::Engine(why)) if why.contains("has confined itself (landlock")),
        "{result:?}"
    );
    continue_and_wait(source, tid(1), migration, &mut Vec::new());
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_time_namespace_of_its_own_is_refused() {
    assert_refused("own-time", "", "a time namespace of its own");
}
