! Feeds mpiddp.data.Stream from Fortran, with mpiddp_stream.c. A sample is an array of C_LOCs, one for each field.
module mpiddp_stream
   use, intrinsic :: iso_c_binding
   implicit none
   private
   public :: stream_open, stream_put, stream_close

   interface
      function c_open(comm, tag, fields) bind(C, name="mpiddp_stream_open_f") result(stream)
         import
         integer(c_int), intent(in), optional :: comm
         integer(c_int), value :: tag
         character(c_char), intent(in) :: fields(*)
         type(c_ptr) :: stream
      end function

      ! The result is 1 if the sample was sent, 0 if it was dropped, and -1 if the trainers want no more samples.
      integer(c_int) function stream_put(stream, sample) bind(C, name="mpiddp_stream_put_f")
         import
         type(c_ptr), value :: stream
         type(c_ptr), intent(in) :: sample(*)
      end function

      subroutine stream_close(stream) bind(C, name="mpiddp_stream_close_f")
         import
         type(c_ptr), value :: stream
      end subroutine
   end interface

contains

   ! `fields` describes a sample, as in "u float32 64 64; step int64". Dimensions are in C's order, in which the last
   ! index runs fastest, so trainers see the transpose of a Fortran array. Without `comm` the stream uses
   ! MPI_COMM_WORLD. It calls MPI_Init if the program has not.
   type(c_ptr) function stream_open(fields, comm, tag) result(stream)
      character(*), intent(in) :: fields
      integer, intent(in), optional :: comm, tag
      integer(c_int) :: with_tag
      with_tag = 31000
      if (present(tag)) with_tag = tag
      stream = c_open(comm, with_tag, fields//c_null_char)
   end function
end module
