# A Perl program of the table of moves, as described in kinds.h: a child with pipes both ways, a file half read, a handler.
use strict;
use warnings;
use IO::Handle;
my ($row, $place) = @ARGV;
my $told = 0;
$SIG{USR1} = sub { $told++ };
sub say_it { syswrite(STDOUT, "$_[0]\n") }
sub check { my ($good, $what) = @_; if (!$good) { say_it("wrong: $what"); exit 1 } }
my %words = map { $_ => "word $_" x 10 } 1 .. 20000;
open(my $out, '>', "$place/text") or die;
print $out "line $_\n" for 1 .. 5000;
close($out);
open(my $text, '<', "$place/text") or die;
for my $n (1 .. 100) { check(scalar(<$text>) eq "line $n\n", "line $n") }
pipe(my $from, my $to_parent) or die;
pipe(my $from_parent, my $to) or die;
my $child = fork();
if ($child == 0) {
    close($to);
    $to_parent->autoflush(1);
    while (defined(my $line = <$from_parent>)) { print $to_parent "heard $line" }
    exit 9;
}
close($from_parent);
$to->autoflush(1);
print $to "before\n";
say_it("ready");
select(undef, undef, undef, 0.001) until -e "$place/go";
check(scalar(<$from>) eq "heard before\n", "the pipe, before");
print $to "after\n";
check(scalar(<$from>) eq "heard after\n", "the pipe, after");
for my $n (101 .. 5000) { check(scalar(<$text>) eq "line $n\n", "line $n") }
check($words{$_} eq "word $_" x 10, "word $_") for 1 .. 20000;
kill 'USR1', $$;
check($told == 1, "the handler");
close($to);
check(waitpid($child, 0) == $child && $? >> 8 == 9, "the child");
say_it("right");
exit 7;
