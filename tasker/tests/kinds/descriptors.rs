//! Descriptors whose other ends, if any, are inside the task.

use super::scene::{becomes, survives, survives_elsewhere};

#[test]
fn pipes_keep_the_data_on_their_way_and_their_size() {
    survives("descriptors", "pipes");
}

#[test]
fn a_stream_socket_pair_keeps_the_data_on_its_way() {
    survives("descriptors", "stream-pair");
}

#[test]
fn a_datagram_socket_pair_keeps_its_messages() {
    survives("descriptors", "datagram-pair");
}

#[test]
fn a_sequenced_packet_socket_pair_keeps_its_messages() {
    survives("descriptors", "packet-pair");
}

#[test]
fn a_descriptor_on_its_way_through_a_socket_arrives() {
    survives("descriptors", "descriptor-in-flight");
}

#[test]
fn an_eventfd_keeps_its_count() {
    survives("descriptors", "events");
}

#[test]
fn an_epoll_set_keeps_what_it_watches_and_how() {
    survives("descriptors", "polls");
}

#[test]
fn a_timerfd_keeps_its_time_left() {
    survives("descriptors", "timers");
}

#[test]
fn a_signalfd_gets_what_was_pending_and_what_comes() {
    survives("descriptors", "signals");
}

#[test]
fn inotify_goes_on_watching() {
    survives("descriptors", "watches");
}

#[test]
fn a_pidfd_still_means_the_same_process() {
    survives("descriptors", "pidfds");
}

#[test]
fn a_memfd_of_its_own_keeps_content_position_and_seals() {
    survives("descriptors", "memory-files");
}

#[test]
fn descriptors_keep_their_numbers_flags_owners_and_those_who_share_them() {
    survives("descriptors", "numbers");
}

#[test]
fn listening_and_datagram_sockets_go_on_at_their_addresses() {
    survives_elsewhere("descriptors", "listening", "true");
}

#[test]
fn a_connection_by_name_within_the_task_stays() {
    survives("descriptors", "named-within");
}

#[test]
fn a_terminal_with_both_ends_inside_keeps_size_and_mode() {
    survives_elsewhere("descriptors", "terminal", "true");
}

#[test]
fn options_of_sockets_and_their_half_closed_state_are_kept() {
    survives("descriptors", "options");
}

#[test]
fn what_inotify_had_seen_and_nobody_had_read_is_lost() {
    becomes("descriptors", "unread-watches", "lost");
}

#[test]
fn asynchronous_input_and_output_goes_on() {
    survives("descriptors", "asynchronous");
}
