//! Tests descriptors that are not connected to processes outside the task.

use super::scene::{becomes, survives, survives_elsewhere};

/// Pipes keep their buffered data and their size.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn pipes_keep_their_data_and_size() {
    survives("descriptors", "pipes");
}

/// A stream socket pair keeps its buffered data.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn stream_socket_pair_keeps_its_data() {
    survives("descriptors", "stream-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_datagram_socket_pair_keeps_its_messages() {
    survives("descriptors", "datagram-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_sequenced_packet_socket_pair_keeps_its_messages() {
    survives("descriptors", "packet-pair");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_descriptor_on_its_way_through_a_socket_arrives() {
    survives("descriptors", "descriptor-in-flight");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_eventfd_keeps_its_count() {
    survives("descriptors", "events");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_epoll_set_keeps_what_it_watches_and_how() {
    survives("descriptors", "polls");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_timerfd_keeps_its_time_left() {
    survives("descriptors", "timers");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_signalfd_gets_what_was_pending_and_what_comes() {
    survives("descriptors", "signals");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn inotify_goes_on_watching() {
    survives("descriptors", "watches");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_pidfd_still_means_the_same_process() {
    survives("descriptors", "pidfds");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_memfd_of_its_own_keeps_content_position_and_seals() {
    survives("descriptors", "memory-files");
}

/// Descriptors keep their numbers, flags and owners, and remain shared between processes.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn descriptors_keep_numbers_flags_and_sharing() {
    survives("descriptors", "numbers");
}

/// Listening and datagram sockets keep their addresses.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sockets_keep_their_addresses() {
    survives_elsewhere("descriptors", "listening", "true");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_connection_by_name_within_the_task_stays() {
    survives("descriptors", "named-within");
}

/// A terminal with both ends inside the task keeps its size and mode.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn inner_terminal_keeps_size_and_mode() {
    survives_elsewhere("descriptors", "terminal", "true");
}

/// Sockets keep their options and their half-closed state.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sockets_keep_options_and_half_closed_state() {
    survives("descriptors", "options");
}

/// Inotify events that were not read before the migration are lost.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unread_inotify_events_are_lost() {
    becomes("descriptors", "unread-watches", "lost");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn asynchronous_input_and_output_goes_on() {
    survives("descriptors", "asynchronous");
}
