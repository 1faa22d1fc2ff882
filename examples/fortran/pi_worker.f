c     pi_worker.f - counts random points for fpi_master, which starts it.
c     The masters in other languages can use it as well.
      program piwork
      implicit none
      include 'fpvm3.h'
c     From the master: the number of a piece, and how many points it
c     has. To the master: the number of the piece, and how many points
c     are hits. The last tag: there is no more work, or no master.
      integer tgwork, tgres, tgdone
      parameter (tgwork = 1, tgres = 2, tgdone = 3)
      integer master(1), messag, bytes, tag, source, info, words(2)
      integer nhits
      external nhits

c     The error is PvmNoParent in a program that no task has started.
      call pvmfparent(master(1))
      call must(master(1), 'pvmfparent')
c     The daemon sends the last tag when the master ends: no worker
c     waits for a master that is lost.
      call pvmfnotify(PVMTASKEXIT, tgdone, 1, master, info)
      call must(info, 'pvmfnotify')

   10 continue
      call pvmfrecv(-1, -1, messag)
      call must(messag, 'pvmfrecv')
      call pvmfbufinfo(messag, bytes, tag, source, info)
      call must(info, 'pvmfbufinfo')
      if (tag .eq. tgdone) goto 20
      call pvmfunpack(INTEGER4, words, 2, 1, info)
      call must(info, 'pvmfunpack')
      words(2) = nhits(words(1), words(2))
      call pvmfinitsend(PVMDATADEFAULT, messag)
      call must(messag, 'pvmfinitsend')
      call pvmfpack(INTEGER4, words, 2, 1, info)
      call must(info, 'pvmfpack')
      call pvmfsend(master(1), tgres, info)
      call must(info, 'pvmfsend')
      goto 10

   20 call pvmfexit(info)
      call must(info, 'pvmfexit')
      end

c     Returns how many points of a piece lie in the quarter of a circle
c     around 0 with the radius m. The seed depends on the number of the
c     piece only; a random number x becomes x * factor mod m.
      integer function nhits(piece, points)
      implicit none
      integer piece, points, i
      integer*8 x, y, m, factor, step
      parameter (m = 2147483647, factor = 48271, step = 1000003)
      nhits = 0
      y = 1 + piece * step
      do 30 i = 1, points
         x = mod(y * factor, m)
         y = mod(x * factor, m)
         if (x * x + y * y .lt. m * m) nhits = nhits + 1
   30 continue
      end

c     Ends the program if the answer of a call is an error.
      subroutine must(answer, name)
      implicit none
      integer answer, info
      character*(*) name
      if (answer .ge. 0) return
      write (0, *) 'fpi_worker: ', name, ': error ', answer
      call pvmfexit(info)
      stop 1
      end
