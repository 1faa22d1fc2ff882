//! Tests descriptors that are connected to no process outside the task.

use super::fixture::{
    MigrationFixture, assert_prints_after_migration, assert_survives,
    assert_survives_on_other_host, start_other_host, start_tasker,
};
use sempa_proto::migration::Refusal;
use std::net::Ipv4Addr;

/// Pipes keep their buffered data and their buffer size.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn pipes_keep_their_data_and_size() {
    assert_survives("descriptors", "pipes");
}

/// A stream socket pair keeps its buffered data.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn stream_socket_pair_keeps_its_data() {
    assert_survives("descriptors", "stream-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_datagram_socket_pair_keeps_its_messages() {
    assert_survives("descriptors", "datagram-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_sequenced_packet_socket_pair_keeps_its_messages() {
    assert_survives("descriptors", "packet-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_descriptor_on_its_way_through_a_socket_arrives() {
    assert_survives("descriptors", "descriptor-in-flight");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_eventfd_keeps_its_count() {
    assert_survives("descriptors", "events");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_epoll_set_keeps_what_it_watches_and_how() {
    assert_survives("descriptors", "polls");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_timerfd_keeps_its_time_left() {
    assert_survives("descriptors", "timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_signalfd_gets_what_was_pending_and_what_comes() {
    assert_survives("descriptors", "signals");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn inotify_goes_on_watching() {
    assert_survives("descriptors", "watches");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_pidfd_still_means_the_same_process() {
    assert_survives("descriptors", "pidfds");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_memfd_of_its_own_keeps_content_position_and_seals() {
    assert_survives("descriptors", "memory-files");
}

/// Descriptors keep their numbers, flags and owners. Descriptors that processes share remain
/// shared.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn descriptors_keep_numbers_flags_and_sharing() {
    assert_survives("descriptors", "numbers");
}

/// Listening and datagram sockets keep their addresses.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sockets_keep_their_addresses() {
    assert_survives_on_other_host("descriptors", "listening", "true");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_connection_by_name_within_the_task_stays() {
    assert_survives("descriptors", "named-within");
}

/// A terminal that only the task has open keeps its size and mode.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn inner_terminal_keeps_size_and_mode() {
    assert_survives_on_other_host("descriptors", "terminal", "true");
}

/// Sockets keep their options and their half-closed state.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sockets_keep_options_and_half_closed_state() {
    assert_survives("descriptors", "options");
}

/// Inotify events that the task has not read before the migration are lost.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unread_inotify_events_are_lost() {
    assert_prints_after_migration("descriptors", "unread-watches", "lost");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn asynchronous_input_and_output_goes_on() {
    assert_survives("descriptors", "asynchronous");
}

/// A half of a socket pair whose other half is closed connects to nobody.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn half_of_a_socket_pair_stays_alone() {
    assert_survives("descriptors", "lone-halves");
}

/// A socket that is bound to an address of the source is refused by a target without the address.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn socket_at_an_address_of_the_source_is_refused() {
    let mut fixture = MigrationFixture::with_target(|dir| start_other_host(dir, "true"));
    let own_address = Ipv4Addr::new(10, 77, 99, 1);
    let script = format!("ip link set lo up && ip addr add {own_address}/32 dev lo && exec \"$@\"");
    fixture.source = start_tasker(&["unshare", "--net", "sh", "-c", &script, "sh"], &[]);
    let program = fixture.compile_c("descriptors");
    fixture.start_and_wait_until_ready(&program, &[], "host-address", &own_address.to_string());
    let expected = Refusal::Address {
        address: own_address.into(),
    };
    assert_eq!(fixture.query_verdict(), [expected]);
    fixture.assert_ends_successfully();
}
